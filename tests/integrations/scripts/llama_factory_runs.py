"""``llamafactory-cli train`` on a tiny Llama: ``llama_factory_runs.py CASE...`` prints what each run did as JSON.
There are eight documents, which make one padded batch, or one row of neat packing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from tiny_hub import save_tiny_llama, write

RUN = ["-m", "fa2patch", "run"]
BUDGET = [*RUN, "--max-tokens", "400"]
# LLaMA-Factory pads rows, but not their position_ids, to a multiple of 8
NEAT = {"neat_packing": True, "per_device_train_batch_size": 1, "cutoff_len": 704}
LORA = {"finetuning_type": "lora", "lora_rank": 4, "lora_dropout": 0.0, "lora_target": "all"}
DPO = {"stage": "dpo", "dataset": "pairs", "pref_beta": 0.1, "remove_unused_columns": False}
# What starts the command, and what differs from the configuration of a padded training.
CASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "padded": ([], {}),
    "padded, budget": (BUDGET, {}),
    "lora": ([], LORA),
    "lora, budget": (BUDGET, LORA),
    "neat, sdpa": (RUN, {**NEAT, "flash_attn": "sdpa"}),
    "neat, fa2": (RUN, {**NEAT, "flash_attn": "fa2"}),
    "dpo": ([], DPO),
    "dpo, patched": (RUN, DPO),
}

# A sitecustomize.py notes what a training does, because LLaMA-Factory has no plugins.
STARTUP = """
import atexit, json, os, sys

if "fa2patch" not in sys.orig_argv:  # the process that becomes the command
    if os.environ["FLASH"]:
        from compat_matrix.check.stand_in import install

        install()
    from trainer_recorder import Recorder

    recorder = Recorder()
    recorder.watch()
    atexit.register(lambda: open(os.environ["RECORD"], "w").write(json.dumps(recorder.found())))
"""


def make(folder: Path) -> None:
    save_tiny_llama(folder / "model")
    texts = [(f"What is {n} and {n}?", " ".join(["it is", str(2 * n)] * (n * n % 7 + 1))) for n in range(8)]
    write(folder / "train.jsonl", [{"instruction": asked, "output": said} for asked, said in texts])
    write(folder / "pairs.jsonl", [{"instruction": asked, "chosen": said, "rejected": "no"} for asked, said in texts])
    asked = {"prompt": "instruction", "response": "output"}
    pairs = {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}
    files = {
        "train": {"file_name": "train.jsonl", "columns": asked},
        "pairs": {"file_name": "pairs.jsonl", "columns": pairs, "ranking": True},
    }
    (folder / "dataset_info.json").write_text(json.dumps(files))
    (folder / "startup").mkdir()
    (folder / "startup" / "sitecustomize.py").write_text(STARTUP)
    (folder / "startup" / "torchaudio.py").touch()  # its wheel on PyPI needs CUDA; it is imported, and used for sound


def configuration(changed: dict[str, Any], folder: Path) -> dict[str, Any]:
    return {
        "model_name_or_path": str(folder / "model"), "template": "default", "stage": "sft", "do_train": True,
        "finetuning_type": "full", "dataset": "train", "dataset_dir": str(folder), "cutoff_len": 256,
        "preprocessing_num_workers": 1, "dataloader_num_workers": 0, "output_dir": str(folder / "out"),
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "overwrite_output_dir": True, "max_steps": 4,
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "learning_rate": 1e-3, "seed": 3,
        "lr_scheduler_type": "constant", "weight_decay": 0.0, "bf16": False, "fp16": False, "use_cpu": True, **changed,
    }  # fmt: skip


def run(case: str, folder: Path) -> dict[str, Any]:
    start, changed = CASES[case]
    file, record = folder / "config.yaml", folder / f"{case}.json"
    file.write_text(json.dumps(configuration(changed, folder)))  # JSON is YAML
    binaries = Path(sys.executable).parent
    variables = {
        "PYTHONPATH": os.pathsep.join([str(folder / "startup"), str(Path(__file__).parent), os.environ["PYTHONPATH"]]),
        "PATH": os.pathsep.join([str(binaries), os.environ["PATH"]]), "CUDA_VISIBLE_DEVICES": "",
        "RECORD": str(record), "FLASH": "1" if changed.get("flash_attn") == "fa2" else "",
    }  # fmt: skip
    command = ["llamafactory-cli", "train", str(file)]
    line = [sys.executable, *start, *command] if start else [str(binaries / command[0]), *command[1:]]
    done = subprocess.run(line, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True)
    if done.returncode or not record.exists():
        raise SystemExit("\n".join([case, *done.stderr.splitlines()[-60:]]))
    said = [line for line in done.stderr.splitlines() if line.startswith("fa2patch:")]
    return {**json.loads(record.read_text()), "said": said}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        make(Path(temporary))
        found = {case: run(case, Path(temporary)) for case in sys.argv[1:]}
    print(json.dumps({"version": metadata.version("llamafactory"), **found}))
