"""ms-swift trains a tiny Llama, padded and packed: ``ms_swift_runs.py CASE...`` prints what each run did as JSON.
Each training is a process of its own, which runs what ``swift sft`` and ``swift rlhf`` start, or one of these commands.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.update(CUDA_VISIBLE_DEVICES="", USE_HF="1", MODELSCOPE_OFFLINE="1")

import torch
import transformers
from tiny_hub import save_tiny_llama, write
from trainer_recorder import Recorder

try:
    from swift.pipelines import rlhf_main, sft_main
except ImportError:  # ms-swift 3
    from swift.llm import rlhf_main, sft_main

OLD = metadata.version("ms-swift").startswith("3.")
FREE, PACKED = ["--padding_free", "true"], ["--packing", "true", "--per_device_train_batch_size", "1"]
EMBEDDING = ["--task_type", "embedding", "--loss_type", "infonce", "--dataset", "texts.jsonl"]
RERANKER = ["--task_type", "reranker", "--dataset", "ranked.jsonl"]
RERANKER += ["--loss_type", "reranker" if OLD else "pointwise_reranker"]
DPO = ["--rlhf_type", "dpo", "--dataset", "pairs.jsonl"]
GRPO = ["--rlhf_type", "grpo", "--dataset", "asked.jsonl", "--reward_funcs", "words"]
GRPO += ["--num_generations", "4", "--max_completion_length", "12", "--beta", "0.04", "--use_vllm", "false"]
# Whether fa2patch's plugin is given, and what differs from a padded training. A command is named as it is typed.
CASES: dict[str, tuple[bool, list[str]]] = {
    "padded": (False, []),
    "padded, patched": (True, []),
    "padding_free": (True, FREE),
    "packing": (True, [*PACKED, "--learning_rate", "0", "--max_length", "300"]),
    "refused": (False, FREE),
    "dpo": (False, DPO),
    "dpo, padding_free": (True, [*DPO, *FREE]),
    "grpo": (False, GRPO),
    "grpo, patched": (True, GRPO),
    "grpo, padding_free": (True, [*GRPO, *FREE]),
    "lora": (False, ["--lora"]),
    "lora, padding_free": (True, ["--lora", *FREE]),
    "embedding": (False, EMBEDDING),
    "embedding, padding_free": (True, [*EMBEDDING, *FREE]),
    "reranker": (False, RERANKER),
    "reranker, patched": (True, RERANKER),
    "swift sft": (True, FREE),
}  # fmt: skip

# A plugin beside fa2patch's, for a training that is a command.
RECORDER = """
import os

from trainer_recorder import Recorder

Recorder().write_at_exit(os.environ["RECORD"])
"""


# A plugin with a reward function for GRPO.
REWARD = """
try:
    from swift.rewards.orm import ORM, orms
except ImportError:  # ms-swift 3
    from swift.plugin.orm import ORM, orms


class Words(ORM):
    def __call__(self, completions, **others):
        return [float(len(set(completion.split()))) for completion in completions]


orms["words"] = Words
"""


def turn(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def make(folder: Path) -> None:
    save_tiny_llama(folder / "model")
    texts = [(f"What is {n} and {n}?", " ".join(["it is", str(2 * n)] * (n % 5 + 1))) for n in range(32)]
    write(folder / "train.jsonl", [{"messages": turn(*text)} for text in texts])
    write(folder / "pairs.jsonl", [{"messages": turn(*text), "rejected_response": "no"} for text in texts])

    asked = [{"messages": turn(*text)[:1], "positive_messages": [turn(*text)[1:]]} for text in texts]
    answers = [{**each, "negative_messages": [turn("", "no")[1:], turn("", "I do not know")[1:]]} for each in asked]
    write(folder / "ranked.jsonl", answers)
    users = [[{"role": "user", "content": answer}] for _, answer in texts]
    write(folder / "texts.jsonl", [{**each, "positive_messages": [user]} for each, user in zip(asked, users)])
    write(folder / "asked.jsonl", [{"messages": turn(*text)[:1]} for text in texts])
    (folder / "recorder.py").write_text(RECORDER)
    (folder / "reward.py").write_text(REWARD)


def arguments(folder: Path, patched: bool, changed: list[str]) -> list[str]:
    kind = "--train_type" if OLD else "--tuner_type"
    tuner = [kind, "full"]
    if "--lora" in changed:
        tuner = [kind, "lora", "--lora_rank", "4", "--lora_dropout", "0"]
        changed = [word for word in changed if word != "--lora"]
    plugins = [*(["reward.py"] if "grpo" in changed else []), *([str(plugin_file())] if patched else [])]
    plugin = ["--external_plugins", *plugins] if plugins else []
    given = {
        "model": folder / "model", "model_type": "llama3_2" if OLD else "llama", "template": "chatml",
        "torch_dtype": "float32",
        "attn_impl": "sdpa", "dataset": "train.jsonl", "max_length": 96, "max_steps": 4, "learning_rate": 1e-3,
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "logging_steps": 1, "warmup_ratio": 0,
        "lr_scheduler_type": "constant", "save_strategy": "no", "split_dataset_ratio": 0, "output_dir": folder / "out",
        "add_version": "false", "dataloader_num_workers": 0, "dataset_num_proc": 1, "report_to": "none", "seed": 3,
        "gradient_checkpointing": "false", "weight_decay": 0, "check_model": "false", "use_cpu": "true",
    }  # fmt: skip
    named = set(changed[::2])
    kept = [word for name, value in given.items() if f"--{name}" not in named for word in (f"--{name}", str(value))]
    return [*kept, *tuner, *plugin, *changed]


def plugin_file() -> Path:
    import fa2patch

    return Path(fa2patch.__file__).parent / "integrations" / "ms_swift.py"


def alone(batch: dict[str, Any], folder: Path) -> float:
    # The model as it was saved computes each document by itself.
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="eager")
    starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    total, number = torch.zeros(()), 0
    for start, stop in zip(starts, [*starts[1:], batch["position_ids"].shape[1]]):
        ids, labels = batch["input_ids"][:, start:stop], batch["labels"][:, start:stop]
        with torch.no_grad():
            logits = model(ids).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits, labels[0, 1:], ignore_index=-100, reduction="sum")
        number += int((labels[0, 1:] != -100).sum())
    return (total / number).item()


def train(case: str, folder: Path) -> None:
    # The process ends with the training.
    opened = os.open(folder / f"{case}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(opened, 1)
    os.dup2(opened, 2)
    patched, changed = CASES[case]
    status, recorder = 1, Recorder()
    recorder.watch()
    try:
        os.chdir(folder)
        given = arguments(folder, patched, changed)
        (rlhf_main if "--rlhf_type" in changed else sft_main)(given)
        alones = {"alone": [alone(batch, folder) for batch in recorder.batches]} if case == "packing" else {}
        (folder / f"{case}.json").write_text(json.dumps({**recorder.found(), **alones}))
        status = 0
    except BaseException as error:
        traceback.print_exc()
        (folder / f"{case}.json").write_text(json.dumps({"refused": str(error)}))
        status = 0 if case == "refused" else 1
    sys.stderr.flush()
    os._exit(status)


def command(case: str, folder: Path) -> int:
    # A second plugin writes what was found.
    given = arguments(folder, *CASES[case])
    given.insert(given.index("--external_plugins") + 2, str(folder / "recorder.py"))
    path = os.pathsep.join([str(Path(__file__).parent), os.environ["PYTHONPATH"]])
    variables = {**os.environ, "RECORD": str(folder / f"{case}.json"), "PYTHONPATH": path}
    name, *rest = case.split()
    with open(folder / f"{case}.log", "w") as log:
        line = [str(Path(sys.executable).with_name(name)), *rest, *given]
        return subprocess.run(line, cwd=folder, env=variables, stdout=log, stderr=log).returncode


def forked(case: str, folder: Path) -> int:
    child = os.fork()
    if not child:
        train(case, folder)
    return os.waitpid(child, 0)[1]


def run(case: str, folder: Path) -> dict[str, Any]:
    status = (command if case.startswith("swift ") else forked)(case, folder)
    said = (folder / f"{case}.log").read_text().splitlines()
    if status:
        raise SystemExit("\n".join([case, *said[-50:]]))
    ours = [line for line in said if line.startswith("fa2patch:")]
    return {**json.loads((folder / f"{case}.json").read_text()), "said": ours}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        make(Path(temporary))
        found = {case: run(case, Path(temporary)) for case in sys.argv[1:]}
    print(json.dumps({"version": metadata.version("ms-swift"), **found}))
