"""One training run in a separate process, for reproduce_paper.py: `python paper_once.py JOB.json RESULT.json`.

A separate process makes its peak memory measurable. Variants differ in their mini-batches, in the layout of these, and
in whether `fa2patch.apply` is called.
"""

from __future__ import annotations

import json
import math
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from paper_variants import VARIANTS, MiniBatch, Sizes, Variant
from train_once import Batch, Example, Stopwatch, Watch, build_model, mean_loss, pad, training_arguments
from transformers import Trainer
from transformers.trainer_callback import PrinterCallback

import fa2patch

VALIDATION_TOKENS = 256
"""Padded tokens of a batch of held-out documents. They are few, so that training determines the peak memory."""


class Counted:
    """Lay out mini-batches and record their contents. For the Trainer, a mini-batch is one item of its data set."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self.real: list[int] = []
        self.computed = self.targets = self.checksum = 0

    def __call__(self, items: list[MiniBatch]) -> Batch:
        (documents,) = items
        batch = self.variant.collate(documents)
        self.real.append(sum(len(document["input_ids"]) for document in documents))
        self.computed += batch["input_ids"].numel()
        self.targets += int((batch["labels"][:, 1:] != -100).sum())
        ids = json.dumps([document["input_ids"] for document in documents])
        self.checksum = zlib.crc32(ids.encode(), self.checksum)
        return batch


def held_out(documents: list[Example]) -> list[Batch]:
    """Return the validation batches, the same padded ones for all variants, each of documents of similar length."""
    groups: list[list[Example]] = [[]]
    for document in sorted(documents, key=lambda document: len(document["input_ids"])):
        if (len(groups[-1]) + 1) * len(document["input_ids"]) > VALIDATION_TOKENS and groups[-1]:
            groups.append([])
        groups[-1].append(document)
    return [pad(group) for group in groups]


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Run the job and return its measurements."""
    variant = VARIANTS[job["variant"]]
    sizes = Sizes(job["batch_size"], job["row_length"], job["seed"])
    mini_batches = variant.mini_batches(job["train"], sizes)
    steps = math.ceil(len(mini_batches) / job["accumulate"])

    model = build_model(job)
    if variant.ids:
        fa2patch.apply(model)
    arguments = training_arguments(
        {**job, "batch_size": 1, "steps": steps, "eval_every": math.ceil(steps / job["evaluations"])}
    )
    arguments.gradient_accumulation_steps = job["accumulate"]
    arguments.logging_steps = max(1, steps // 20)

    counted = Counted(variant)
    watch = Watch(job["variant"], held_out(job["validation"]), math.ceil(steps / job["evaluations"]))
    trainer = Trainer(model=model, args=arguments, train_dataset=mini_batches, data_collator=counted, callbacks=[watch])
    trainer.remove_callback(PrinterCallback)
    whole = Stopwatch()
    trainer.train()
    whole.stop()

    assert len(counted.real) == len(mini_batches), "one epoch: every mini-batch once"
    timed = sum(counted.real[job["accumulate"] :])  # without the first step
    return {
        "variant": job["variant"],
        "seed": job["seed"],
        "rows": variant.rows(mini_batches),
        "mini_batches": len(mini_batches),
        "optimizer_steps": trainer.state.global_step,
        "real_tokens": sum(counted.real),
        "computed_tokens": counted.computed,
        "targets": counted.targets,
        "checksum": counted.checksum,
        "training_seconds": watch.stopwatch.seconds,
        "wall_seconds": whole.seconds,
        "processor_seconds": watch.stopwatch.processor,
        "real_tokens_per_second": timed / watch.stopwatch.seconds,
        "real_tokens_per_processor_second": timed / watch.stopwatch.processor,
        "peak_memory_bytes": watch.peak,
        "training_memory_bytes": watch.peak - watch.memory_before,
        "validation_loss": watch.curve[-1][1],
        "validation_curve": watch.curve,
        "train_curve": [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry],
        "validation_loss_packed": mean_loss(model, packed(job["validation"])) if variant.ids else None,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "model_class": type(model).__name__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
    }


def packed(documents: list[Example]) -> list[Batch]:
    """Return the documents in packed batches of four."""
    flatten = fa2patch.DataCollatorWithFlattening()
    return [flatten(documents[start : start + 4]) for start in range(0, len(documents), 4)]


def main() -> None:
    """Run the job of the first file and write the result to the second."""
    job_file, result_file = map(Path, sys.argv[1:])
    job = json.loads(job_file.read_text(encoding="utf-8"))
    result_file.write_text(json.dumps(train(job)), encoding="utf-8")


if __name__ == "__main__":
    main()
