"""``axolotl train`` on a tiny Llama, padded and packed: ``axolotl_runs.py CASE...`` prints what each run did as JSON.

Documents come in groups of four. A group fills a row of sequence_len, and the first document of the next one, which is
long, does not fit. So axolotl's sequential packing makes a row of each group, and a padded batch of four is one too.
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

os.environ.update(AXOLOTL_DO_NOT_TRACK="1", DO_NOT_TRACK="1", WANDB_MODE="disabled", CUDA_VISIBLE_DEVICES="")

import axolotl.cli.train  # noqa: F401  what every training imports
import torch
from axolotl.cli.main import main
from tiny_hub import save_tiny_llama, write

LENGTH = 96
OLD = int(metadata.version("axolotl").split(".")[1]) < 15
OURS = "fa2patch.integrations.axolotl.Plugin"
PACKED = {"sample_packing": True, "eval_sample_packing": True, "micro_batch_size": 1, "eval_batch_size": 1}
PAIRS = {
    "rl": "dpo", "remove_unused_columns": False, "test_datasets": None, "eval_steps": None, "curriculum_sampling": None,
    "datasets": [{"path": "pairs.jsonl", "ds_type": "json", "split": "train", "type": {"field_prompt": "prompt"}}],
}  # fmt: skip
NO_KERNELS = dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), False)  # they need a GPU
LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "lora_target_linear": True, **NO_KERNELS}
# The plugins, and what differs from a padded training. A command is named as it is typed.
CASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "padded": ([], {}),
    "padded, eight": ([], {"micro_batch_size": 8, "gradient_accumulation_steps": 1}),
    "padded, patched": ([OURS], {}),
    "packed": ([OURS], PACKED),
    "packed, rows of axolotl": ([OURS], {**PACKED, "pad_to_sequence_len": True}),
    "packed, two rows": ([OURS], {**PACKED, "micro_batch_size": 2, "gradient_accumulation_steps": 1}),
    "dpo": ([], PAIRS),
    "dpo, patched": ([OURS], PAIRS),
    "lora": ([], LORA),
    "lora, packed": ([OURS], {**LORA, **PACKED}),
    "axolotl train": ([OURS], PACKED),
}


def documents(groups: int, seed: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)

    def drawn(low: int, high: int, number: int) -> list[int]:
        return torch.randint(low, high, (number,), generator=generator).tolist()

    lengths = [length for _ in range(groups) for length in [*drawn(40, 51, 1), *drawn(8, 15, 3)]]
    rows = [drawn(5, 300, length) for length in lengths]
    return [{"input_ids": row, "attention_mask": [1] * len(row), "labels": row} for row in rows]


def make(folder: Path) -> None:
    save_tiny_llama(folder / "model")
    write(folder / "train.jsonl", documents(10, 0))
    write(folder / "test.jsonl", documents(3, 1))
    pairs = [
        {"prompt": f"What is {n}?", "chosen": f" It is {n * n}." * (n % 4 + 1), "rejected": " No."} for n in range(16)
    ]
    write(folder / "pairs.jsonl", pairs)


def configuration(plugins: list[str], changed: dict[str, Any], folder: Path) -> dict[str, Any]:
    tokens = {"ds_type": "json", "split": "train", "type": None}
    attention = {"sdp_attention": True} if OLD else {"attn_implementation": "sdpa"}
    return {
        "base_model": str(folder / "model"), "datasets": [{"path": "train.jsonl", **tokens}],
        "test_datasets": [{"path": "test.jsonl", **tokens}], "dataset_prepared_path": str(folder / "prepared"),
        "sequence_len": LENGTH, "micro_batch_size": 4, "eval_batch_size": 4, "gradient_accumulation_steps": 2,
        "max_steps": 4, "eval_steps": 4, "learning_rate": 1e-3, "optimizer": "adamw_torch", "lr_scheduler": "constant",
        "warmup_steps": 0, "weight_decay": 0.0, "curriculum_sampling": True, "sample_packing_sequentially": True,
        "shuffle_merged_datasets": False, "logging_steps": 1, "save_strategy": "no", "seed": 3, "dataset_processes": 1,
        "bf16": False, "fp16": False, "tf32": False, "float32": True, "gradient_checkpointing": False,
        "output_dir": str(folder / "out"), "plugins": [*plugins, "axolotl_recorder.Recorder"], **attention, **changed,
    }  # fmt: skip


def run(case: str, folder: Path) -> dict[str, Any]:
    plugins, changed = CASES[case]
    file, record, log = folder / "config.yaml", folder / f"{case}.json", folder / f"{case}.log"
    given = {name: value for name, value in configuration(plugins, changed, folder).items() if value is not None}
    file.write_text(json.dumps(given))  # JSON is YAML
    os.environ.update(RECORD=str(record), VERIFIED="1" if OURS in plugins else "")
    status = (command if case == "axolotl train" else forked)(file, log)
    said = log.read_text().splitlines()
    if status or not record.exists():
        raise SystemExit("\n".join([case, *said[-60:]]))
    return {**json.loads(record.read_text()), "said": [line for line in said if line.startswith("fa2patch:")]}


def command(file: Path, log: Path) -> int:
    # The command is run as it is typed.
    path = os.pathsep.join([str(Path(__file__).parent), os.environ["PYTHONPATH"]])  # of the plugin that notes
    line = [str(Path(sys.executable).with_name("axolotl")), "train", str(file), "--launcher", "python"]
    with open(log, "w") as opened:
        variables = {**os.environ, "PYTHONPATH": path}
        return subprocess.run(line, cwd=file.parent, env=variables, stdout=opened, stderr=opened).returncode


def forked(file: Path, log: Path) -> int:
    # axolotl is not imported again.
    child = os.fork()
    if not child:
        train(file, log)
    return os.waitpid(child, 0)[1]


def train(file: Path, log: Path) -> None:
    # This process ends with the training.
    opened = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(opened, 1)
    os.dup2(opened, 2)
    status = 1
    try:
        os.chdir(file.parent)
        sys.argv = ["axolotl", "train", str(file), "--launcher", "python"]
        main()
        status = 0
    except SystemExit as ended:  # click ends so
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        make(Path(temporary))
        found = {case: run(case, Path(temporary)) for case in sys.argv[1:]}
    print(json.dumps({"version": metadata.version("axolotl"), **found}))
