"""One variant of one model in a separate process, so that its peak memory can be measured: JOB.json RESULT.json.

``python -m compat_matrix.bench.gpu`` starts it and describes the variants.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, Callable

import torch

import fa2patch

from . import about, shapes, training
from .kernels import ready
from .lengths import DISTRIBUTIONS
from .models import BY_HAND, ByHand

Job = dict[str, Any]
TOY_SCALE = 0.02
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def run(job: Job) -> dict[str, Any]:
    """Train one model on every distribution of the job. Its weights keep changing, which does not affect speed."""
    started = time.perf_counter()
    kind, _, name = job["variant"].partition(":")
    name, _, lengths = name.partition("+")
    by_hand = ByHand(_kernel(name)) if kind == "by-hand" else None
    if by_hand is not None:
        by_hand.register()
    implementation = {"by-hand": BY_HAND, "fa2patch": "sdpa"}.get(kind, name)
    model = build(job, implementation)
    if kind == "fa2patch":
        fa2patch.apply(model, kernel=name)
    optimizer = OPTIMIZERS[job["optimizer"]](model.parameters(), job["device"])
    trained = _Trained(model, optimizer, job["device"], by_hand)
    found: dict[str, Any] = {}
    for place, distribution in enumerate(job["distributions"]):
        share = job["seconds"] * (place + 1) / len(job["distributions"]) - (time.perf_counter() - started)
        drawn = _batches(job, distribution)
        batches = [_layout(kind, lengths)(batch) for batch in drawn]
        found[distribution] = {
            **trained.timed(batches, job["warm_up"], share),
            "real_tokens": [sum(map(len, batch)) for batch in drawn[job["warm_up"] :]],
            "padded_tokens": [len(batch) * max(map(len, batch)) for batch in drawn[job["warm_up"] :]],
            **(trained.synchronisations(batches[: job["sync_steps"]]) if job["device"] == "cuda" else {}),
        }
    return {
        **about.header("", job["device"]),
        "settings": job["settings"],
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layers": model.config.num_hidden_layers,
        "distributions": found,
    }


def build(job: Job, implementation: str) -> Any:
    """Build the model with random weights, on the job's device and in its dtype, with gradient checkpointing."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = shapes.config(job["shape"], job["layers"], job["toy"])
    default = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[job["dtype"]])
    try:
        with torch.device(job["device"]):
            model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    finally:
        torch.set_default_dtype(default)
    model = model.to(DTYPES[job["dtype"]]).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _adamw(parameters: Any, device: str) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-5, fused=device == "cuda")


OPTIMIZERS: dict[str, Callable[[Any, str], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "sgd": lambda parameters, device: torch.optim.SGD(parameters, lr=1e-5),
}
"""AdamW's states have the weights' dtype: a bfloat16 weight takes 8 bytes with its gradient and states. SGD takes 4."""


def _kernel(name: str) -> Any:
    return next(kernel for kernel in fa2patch.kernels.ORDER if kernel.name == name)


def _layout(kind: str, lengths: str) -> Callable[[list[list[int]]], dict[str, Any]]:
    if kind == "padded":
        return training.padded
    return lambda batch: {**training.packed(batch, bool(lengths)), "cuts": [len(document) for document in batch]}


def _batches(job: Job, distribution: str) -> list[list[list[int]]]:
    """Every variant gets the same documents."""
    drawn = DISTRIBUTIONS[distribution].scaled(TOY_SCALE if job["toy"] else 1)
    lengths = training.draw(drawn, job["steps"] + job["warm_up"], job["batch"], job["seed"])
    return training.documents(lengths, shapes.config(job["shape"], toy=job["toy"]).vocab_size, job["seed"])


class _Trained:
    def __init__(self, model: Any, optimizer: Any, device: str, by_hand: ByHand | None) -> None:
        self.model, self.optimizer, self.device, self.by_hand = model, optimizer, device, by_hand

    def timed(self, batches: list[dict[str, Any]], warm_up: int, seconds: float) -> dict[str, Any]:
        """Train until the batches or the seconds are used up; return step times, losses and peak memory."""
        cuda = self.device == "cuda"
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        until, marks, losses = time.perf_counter() + seconds, [], []
        for step, batch in enumerate(batches):
            if step == warm_up:
                marks.append(self._mark())
            losses.append(self._step(batch))
            if step >= warm_up:
                marks.append(self._mark())
            if step > warm_up and step % 4 == 0:  # without it the host would run ahead of the GPU and miss the limit
                torch.cuda.synchronize() if cuda else None
                if time.perf_counter() > until:
                    break
        if cuda:
            torch.cuda.synchronize()
        return {
            "step_seconds": [self._between(a, b) for a, b in zip(marks, marks[1:])],
            "peak_bytes": torch.cuda.max_memory_allocated() if cuda else _peak_of_process(),
            "losses": [round(float(loss), 5) for loss in losses],
        }

    def _step(self, batch: dict[str, Any]) -> torch.Tensor:
        loss = self._forward(batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _forward(self, batch: dict[str, Any]) -> torch.Tensor:
        moved = self._moved(batch)
        return self.model(**moved, use_cache=False).loss

    def _moved(self, batch: dict[str, Any]) -> dict[str, Any]:
        moved = {
            name: value.to(self.device) if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()
            if name != "cuts"
        }
        if self.by_hand is not None:
            made = ready(batch["cuts"])
            made.cu_seqlens = made.cu_seqlens.to(self.device)
            self.by_hand.boundaries = made
        return moved

    def _mark(self) -> Any:
        if self.device != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, first: Any, second: Any) -> float:
        return first.elapsed_time(second) / 1e3 if self.device == "cuda" else second - first

    def synchronisations(self, batches: list[dict[str, Any]]) -> dict[str, Any]:
        """Warnings of torch's sync debug mode, of the forward and of the backward, which recomputes it, apart."""
        places: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}
        for batch in batches:
            moved = self._moved(batch)
            with _warned(places["forward"]):
                loss = self.model(**moved, use_cache=False).loss
            with _warned(places["backward"]):
                loss.backward()
            self.optimizer.zero_grad(set_to_none=True)
        return {
            "synchronisations": {
                when: {"per_step": sum(counter.values()) / len(batches), "where": dict(counter.most_common(8))}
                for when, counter in places.items()
            }
        }


class _warned(warnings.catch_warnings):  # noqa: N801 (used as a function)
    """Count synchronisation warnings within the block, by the file and line that torch attributes them to."""

    def __init__(self, places: Counter[str]) -> None:
        super().__init__(record=True)
        self.places = places

    def __enter__(self) -> Any:
        self.seen = super().__enter__()
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        return self.seen

    def __exit__(self, *raised: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")
        for warning in self.seen or ():
            if "synchroniz" in str(warning.message):
                self.places[place(warning.filename, warning.lineno)] += 1
        super().__exit__(*raised)


def place(file: str, number: int) -> str:
    """Return ``package/module.py:12``, without this machine's path to its packages."""
    parts = re.split(r"(?:site|dist)-packages/", file.replace(os.sep, "/"))
    inside = parts[-1] if len(parts) > 1 else "/".join(parts[-1].split("/")[-2:])
    return f"{inside}:{number}"


def _peak_of_process() -> int:
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def main() -> None:
    """Run the job of the first file and write the result to the second. Running out of GPU memory is a result too."""
    job_file, result_file = map(Path, itertools.islice(sys.argv, 1, 3))
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    warnings.simplefilter("ignore")
    job = about.read(job_file)
    if job["device"] == "cpu":
        torch.set_num_threads(1)
    try:
        found = run(job)
    except torch.cuda.OutOfMemoryError as error:
        found = {"error": f"out of memory: {str(error).splitlines()[0]}"[:300], "settings": job["settings"]}
    about.write(result_file, found)
    print(json.dumps({"written": result_file.name}))


if __name__ == "__main__":
    main()
