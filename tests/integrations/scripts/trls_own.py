"""Run one of TRL's own scripts, unchanged and without fa2patch: ``trls_own.py sft|dpo|kto|reward|grpo|rloo``.

Its model, tokenizer and dataset are made in a temporary folder. Prints a JSON object: the logged numbers of each step,
and the number of tokens that the layers' MLPs computed.
"""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.llama import modeling_llama
from trl_noting import model, text, tokenizer

OPTIONS = {
    "per_device_train_batch_size": 8, "max_steps": 4, "logging_steps": 1, "learning_rate": 1e-3, "seed": 0,
    "report_to": "none", "save_strategy": "no", "use_cpu": "true", "disable_tqdm": "true", "bf16": "false",
}  # fmt: skip
GROUPS = {"num_generations": 4, "max_completion_length": 10, "beta": 0.04, "reward_funcs": "trl_noting.reward"}
MORE: dict[str, dict[str, Any]] = {
    "sft": {}, "dpo": {}, "kto": {}, "reward": {}, "grpo": GROUPS, "rloo": GROUPS, "packed": {"packing": "true"},
}  # fmt: skip


def row(kind: str, at: int, generator: torch.Generator) -> dict[str, Any]:
    prompt, chosen, rejected = (text(generator, longest) for longest in (12, 24, 8))
    if kind in ("dpo", "reward"):
        return {"prompt": f"{prompt} ", "chosen": chosen, "rejected": rejected}
    if kind == "kto":
        return {"prompt": f"{prompt} ", "completion": chosen, "label": at % 2 > 0}
    return {"prompt": prompt} if kind in ("grpo", "rloo") else {"text": f"{prompt} {chosen}"}


def made(kind: str, folder: Path) -> None:
    words = tokenizer()
    words.chat_template = "{% for m in messages %}{{ ' ' + m['content'] }}{% endfor %}"  # else 0.19.1 downloads one
    words.padding_side = "left" if kind in ("grpo", "rloo") else "right"
    words.save_pretrained(folder / "model")
    head, labels = transformers.LlamaForCausalLM, {}
    if kind == "reward":
        head, labels = transformers.LlamaForSequenceClassification, {"num_labels": 1}
    model(0, len(words), head, bos_token_id=1, eos_token_id=2, **labels).save_pretrained(folder / "model")
    generator = torch.Generator().manual_seed(0)
    (folder / "data").mkdir()
    rows = [json.dumps(row(kind, at, generator)) for at in range(48)]
    (folder / "data" / "train.jsonl").write_text("\n".join(rows))


def main(kind: str, folder: Path) -> None:
    made(kind, folder)
    tokens, logs = [0], []
    computed, log = modeling_llama.LlamaMLP.forward, transformers.Trainer.log

    def forward(layer: Any, states: torch.Tensor) -> torch.Tensor:
        if not vars(layer).get("_is_replica"):  # a proof runs a replica
            tokens[0] += states[..., 0].numel()
        return computed(layer, states)

    def logged(trainer: Any, entry: dict[str, Any], *more: Any, **named: Any) -> None:
        logs.append({name: value for name, value in entry.items() if isinstance(value, (int, float))})
        log(trainer, entry, *more, **named)

    transformers.Trainer.log = logged
    modeling_llama.LlamaMLP.forward = forward
    home = Path(next(iter(importlib.util.find_spec("trl").submodule_search_locations))) / "scripts"
    given = {
        "model_name_or_path": folder / "model", "dataset_name": folder / "data", "output_dir": folder / "out",
        **OPTIONS, **MORE[kind],
    }  # fmt: skip
    script = str(home / f"{'sft' if kind == 'packed' else kind}.py")
    sys.argv = [script, *(word for name, value in given.items() for word in (f"--{name}", str(value)))]
    sys.path.insert(0, str(Path(__file__).parent))
    runpy.run_path(script, run_name="__main__")
    kept = [entry for entry in logs if "loss" in entry]
    print(json.dumps({"logs": kept, "tokens": tokens, "fa2patch": "fa2patch" in sys.modules}))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(sys.argv[1], Path(temporary))
