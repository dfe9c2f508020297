"""Train on the same mini-batches padded, and in passes of a budget of tokens: same steps, same loss, bounded memory.

    python token_budget.py [--model NAME --data FILE.jsonl]

Each way trains in a process of its own, so that the peak of its memory can be read. It runs offline, on a CPU, in about
a minute.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import small
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

import fa2patch

BATCH = 32
WAYS = {"padded": 0.0, "two batches": 2.0, "one batch": 1.0, "half a batch": 0.5}
"""The budgets, in parts of the mean number of tokens of a batch."""


def budget(examples: list[dict[str, Any]], part: float) -> int:
    """Return so many tokens of a mean batch, and at least those of the longest example."""
    lengths = [len(example["input_ids"]) for example in examples]
    return max(max(lengths), round(part * BATCH * sum(lengths) / len(lengths)))


def peak() -> int:
    """Return the largest memory that this process ever used, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    info = psutil.Process().memory_info()
    return int(getattr(info, "peak_wset", info.rss))


def train(argv: list[str] | None, way: str, weights: Path) -> dict[str, Any]:
    """Train one way, and return its losses and what it took. The weights go to a file."""
    options = small.options(__doc__, argv)
    texts = small.texts(options)
    model, tokenizer = small.load(options, texts)
    examples = small.tokenized(texts, tokenizer)
    cls = Trainer
    if way != "padded":
        cls = fa2patch.packed_trainer(Trainer, max_tokens=budget(examples, WAYS[way]))
    trainer = cls(
        model=model,
        args=TrainingArguments(
            output_dir=options.output,
            per_device_train_batch_size=BATCH,
            max_steps=options.steps,
            learning_rate=1e-4,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=examples,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
    )
    before, start = peak(), time.process_time()
    trainer.train()
    torch.save({name: value.clone() for name, value in model.state_dict().items()}, weights)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    passes = [entry.get("passes_per_batch", 1.0) for entry in logs]
    return {
        "losses": [entry["loss"] for entry in logs], "passes": sum(passes) / len(passes),
        "memory": peak() - before, "seconds": time.process_time() - start,
        "max_tokens": None if way == "padded" else trainer.token_budget.max_tokens,
    }  # fmt: skip


def main(argv: list[str] | None = None) -> dict[str, dict[str, Any]]:
    """Train every way, print a table, and return what each took."""
    argv = sys.argv[1:] if argv is None else argv
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in track(WAYS, "training", console=Console(stderr=True)):
            weights = Path(folder, f"{len(found)}.pt")
            variables = {**os.environ, "TOKEN_BUDGET_WAY": json.dumps([way, str(weights)])}
            line = [sys.executable, __file__, *argv]
            done = subprocess.run(line, env=variables, stdout=subprocess.PIPE, text=True, check=True)
            found[way] = json.loads(done.stdout.splitlines()[-1])
            found[way]["weights"] = torch.load(weights)
    show(found)
    return found


def show(found: dict[str, dict[str, Any]]) -> None:
    """Print what each way took, and how far it is from padded training."""
    table = Table("budget", "tokens", "passes a step", "peak MB", "seconds of CPU", "losses", "weights")
    padded = found["padded"]
    for way, one in found.items():
        losses = max(abs(a - b) for a, b in zip(one["losses"], padded["losses"]))
        weights = max(float((one["weights"][name] - value).abs().max()) for name, value in padded["weights"].items())
        apart = ("", "") if way == "padded" else (f"{losses:.0e} apart", f"{weights:.0e} apart")
        table.add_row(
            way, str(one["max_tokens"] or "all"), f"{one['passes']:.1f}", f"{one['memory'] / 1e6:.0f}",
            f"{one['seconds']:.0f}", *apart,
        )  # fmt: skip
    Console(width=110).print(table)


if __name__ == "__main__":
    if "TOKEN_BUDGET_WAY" in os.environ:
        asked, file = json.loads(os.environ["TOKEN_BUDGET_WAY"])
        print(json.dumps(train(None, asked, Path(file))))
    else:
        main()
