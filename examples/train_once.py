"""One training run in a separate process, for train_packed.py: `python train_once.py JOB.json RESULT.json`.

A separate process makes the run's peak memory measurable. Its steps wait for turns: a line on the standard input gives
one, and a line on the standard output hands it over. The two variants differ only in the two lines under `if
variant == "packed"`.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import PrinterCallback

import fa2patch

Example = dict[str, list[int]]
Batch = dict[str, torch.Tensor]
Collator = Callable[[list[Example]], Batch]


def pad(examples: list[Example]) -> Batch:
    """Return a padded batch: one row per document, padded to the longest."""
    rows = {key: [torch.tensor(example[key]) for example in examples] for key in ("input_ids", "labels")}
    for labels in rows["labels"]:
        labels[0] = -100  # nothing predicts it; set so that both variants count the same targets
    return {
        "input_ids": pad_sequence(rows["input_ids"], batch_first=True),
        "labels": pad_sequence(rows["labels"], batch_first=True, padding_value=-100),
        "attention_mask": pad_sequence([torch.ones_like(ids) for ids in rows["input_ids"]], batch_first=True),
    }


class Counted:
    """A collator that records the contents of every mini-batch."""

    def __init__(self, collate: Collator) -> None:
        self.collate = collate
        self.batches: list[dict[str, int]] = []

    def __call__(self, examples: list[Example]) -> Batch:
        batch = self.collate(examples)
        self.batches.append(
            {
                "real": sum(len(example["input_ids"]) for example in examples),
                "computed": batch["input_ids"].numel(),
                "targets": int((batch["labels"][:, 1:] != -100).sum()),
                "checksum": zlib.crc32(json.dumps([example["input_ids"] for example in examples]).encode()),
            }
        )
        return batch


@torch.no_grad()
def mean_loss(model: PreTrainedModel, batches: list[Batch]) -> float:
    """Return the loss per target token over all batches together, not the mean of the batches' means."""
    was_training = model.training
    model.eval()
    total, targets = 0.0, 0
    for batch in batches:
        count = int((batch["labels"][:, 1:] != -100).sum())
        total += float(model(**{key: value.to(model.device) for key, value in batch.items()}).loss) * count
        targets += count
    model.train(was_training)
    return total / targets


class Stopwatch:
    """Measure the seconds while it runs, of the clock and of the processor."""

    def __init__(self) -> None:
        self.seconds = self.processor = 0.0
        self.start()

    def start(self) -> None:
        """Start or continue."""
        self.since, self.worked = self.now(), time.process_time()

    def stop(self) -> None:
        """Pause, and add the interval to ``seconds`` and ``processor``."""
        self.seconds += self.now() - self.since
        self.processor += time.process_time() - self.worked

    @staticmethod
    def now() -> float:
        """Return the clock's seconds, after all queued work on a GPU has ended."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


def hand_over(*running: Stopwatch) -> None:
    """Let the other variant's process go on until it hands over, with these stopwatches stopped.

    So the steps of both variants are taken in turns, and other programs slow both of them down.
    """
    for watch in running:
        watch.stop()
    print("your turn", flush=True)
    sys.stdin.readline()
    for watch in running:
        watch.start()


def memory() -> int:
    """Return the bytes in use: allocated on the GPU if there is one, otherwise resident in the process."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else psutil.Process().memory_info().rss


def peak_memory() -> int:
    """Return the most bytes in use so far, as counted by the allocator or the operating system."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.exists():  # not ru_maxrss, which a child process inherits on Linux
        kibibytes = next(line.split()[1] for line in status.read_text().splitlines() if "VmHWM" in line)
        return int(kibibytes) * 1024
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS


class Watch(TrainerCallback):
    """Evaluate at fixed steps with the clock stopped, and draw the progress bar."""

    def __init__(self, name: str, validation: list[Batch], every: int, whole: Stopwatch | None = None) -> None:
        self.name, self.validation, self.every, self.whole = name, validation, every, whole
        self.curve: list[tuple[int, float]] = []

    def evaluate(self, step: int, model: PreTrainedModel) -> None:
        """Append the validation loss to the curve."""
        self.curve.append((step, mean_loss(model, self.validation)))
        self.bar.set_postfix_str(f"validation loss {self.curve[-1][1]:.3f}")

    def on_train_begin(self, args, state, control, model=None, **kwargs):  # type: ignore[no-untyped-def]
        """Evaluate once and start the clock."""
        line = int(self.name == "packed")  # each process draws its bar on a line of its own
        self.bar = tqdm(total=args.max_steps, desc=self.name, unit="step", ncols=100, position=line)
        self.memory_before = memory()
        self.evaluate(0, model)
        self.stopwatch = Stopwatch()

    def on_step_end(self, args, state, control, model=None, **kwargs):  # type: ignore[no-untyped-def]
        """Stop the clock, evaluate if it is time, and start the clock again."""
        self.stopwatch.stop()
        self.bar.update()
        step = state.global_step
        if step % self.every == 0 or step == args.max_steps:
            self.evaluate(step, model)
        if self.whole is not None and step < args.max_steps:
            hand_over(self.whole)
        if step == 1:  # it also starts thread pools and allocators, so throughput is measured from the second step
            self.stopwatch = Stopwatch()
        self.stopwatch.start()

    def on_train_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        """Close the progress bar and record the peak memory."""
        self.bar.close()
        self.peak = peak_memory()


def build_model(job: dict[str, Any]) -> PreTrainedModel:
    """Return the job's model, or a small Llama with random weights from the seed."""
    if job["model"]:
        return AutoModelForCausalLM.from_pretrained(job["model"]).float()  # autocast makes it bf16
    torch.manual_seed(job["seed"])
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=job["vocab_size"],
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=3,
            max_position_embeddings=max(job["max_length"], 128),
            bos_token_id=None,
            eos_token_id=0,
        )
    )


def training_arguments(job: dict[str, Any]) -> TrainingArguments:
    """Return the Trainer's arguments for the job."""
    cuda = torch.cuda.is_available()
    return TrainingArguments(
        output_dir=job["scratch"],
        max_steps=job["steps"],
        per_device_train_batch_size=job["batch_size"],
        learning_rate=job["learning_rate"],
        lr_scheduler_type="cosine",
        warmup_steps=max(1, job["steps"] // 10),
        logging_steps=min(job["eval_every"], job["steps"]),
        seed=job["seed"],
        use_cpu=not cuda,
        bf16=cuda and torch.cuda.is_bf16_supported(),
        dataloader_pin_memory=cuda,
        remove_unused_columns=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Run the job and return its measurements."""
    variant = job["variant"]
    sys.stdin.readline()  # the first turn
    whole = Stopwatch()
    model = build_model(job)
    collate: Collator = pad
    if variant == "packed":
        fa2patch.apply(model)
        collate = fa2patch.DataCollatorWithFlattening()

    # Both variants are evaluated on the same padded batches, sorted by length so that they hold little padding.
    held_out = sorted(job["validation"], key=lambda example: len(example["input_ids"]))
    groups = [held_out[start : start + 8] for start in range(0, len(held_out), 8)]
    counted = Counted(collate)
    watch = Watch(variant, [pad(group) for group in groups], job["eval_every"], whole)

    trainer = Trainer(
        model=model,
        args=training_arguments(job),
        train_dataset=job["train"],
        data_collator=counted,
        callbacks=[watch],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()

    in_own_layout = mean_loss(model, [collate(group) for group in groups])
    whole.stop()
    batches = counted.batches[: trainer.state.global_step]  # the data loader reads one mini-batch ahead
    logged = [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    real_tokens = sum(batch["real"] for batch in batches[1:])  # the stopwatch leaves out the first step
    return {
        "variant": variant,
        "optimizer_steps": trainer.state.global_step,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "model_class": type(model).__name__,
        "on_gpu": torch.cuda.is_available(),
        "device": torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"CPU threads: {torch.get_num_threads()}",
        "batches": batches,
        "training_seconds": watch.stopwatch.seconds,
        "processor_seconds": watch.stopwatch.processor,
        "wall_seconds": whole.seconds,
        "real_tokens_per_second": real_tokens / watch.stopwatch.seconds,
        "peak_memory_bytes": watch.peak,
        "training_memory_bytes": watch.peak - watch.memory_before,
        "train_curve": logged,
        "validation_curve": watch.curve,
        "validation_loss_in_own_layout": in_own_layout,
    }


def main() -> None:
    """Run the job of the first file and write the result to the second."""
    job_file, result_file = map(Path, sys.argv[1:])
    job = json.loads(job_file.read_text(encoding="utf-8"))
    result_file.write_text(json.dumps(train(job)), encoding="utf-8")


if __name__ == "__main__":
    main()
