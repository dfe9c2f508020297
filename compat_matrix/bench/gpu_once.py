"""What a GPU is measured with, in a process of its own: the WHAT of ``python -m compat_matrix.bench.gpu_once WHAT``.

``kernel NAME`` compares one kernel with the reference; an illegal access on a GPU ends everything that comes after it.
``models KERNEL FAMILY ...`` writes the evidence of :mod:`compat_matrix.check.gpu`. ``hybrids`` holds hybrids with the
kernels of flash-linear-attention and mamba-ssm to the same points, and times a packed row beside its documents one by
one and in a padded batch; without a package its models are recorded as missing. ``training SHAPE VARIANT`` trains one
variant of :mod:`compat_matrix.bench.gpu`, so that its peak of memory can be measured. The file is written after each
case, model or variant, and what it has is not run again.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fa2patch
from fa2patch import kernels
from fa2patch.kernels import Options

from .. import tiny_models
from ..check import gpu
from ..check.kernels import Case, cases, compared, refusal
from ..check.rows import alone, documents, pack
from . import figures, workloads

OUT_OF_TIME = 3
TOY_EVERY = 10  # a toy run takes one case of so many

# The hybrids whose mixers take their kernels from a package, by the package's import name.
FAMILIES = {
    "fla": ("qwen3_next",),
    "mamba_ssm": ("mamba2", "bamba", "jamba", "falcon_h1"),
    "causal_conv1d": ("lfm2",),
}

# document lengths of rows with about a thousand tokens, by their name in the result
LENGTHS = {
    "16 x 64": (64,) * 16,
    "64 x 16": (16,) * 64,
    "256 x 4": (4,) * 256,
    "1 to 256": (256, 1, 128, 30, 200, 90, 7, 60, 33, 150, 69),
}

# A padded batch may be so far from the documents alone, relative to the largest logit.
NEAR = 1e-3


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m compat_matrix.bench.gpu_once", description=__doc__)
    parser.add_argument("what", nargs="+", metavar="WHAT", help="such as kernel NAME, or hybrids")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    parser.add_argument("--seconds", type=float, default=60, help="start nothing later, and end a variant's steps")
    training_options(parser)
    given = parser.parse_args(arguments)
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    warnings.simplefilter("ignore")
    if given.device == "cpu":
        torch.set_num_threads(1)
    header, (what, *names) = figures.header("", given.device), given.what
    if what == "training":
        figures.write(given.out, {**header, **trained(given, *names)})
        return 0
    if what == "kernel":
        wanted = dict(list(cases().items())[:: TOY_EVERY if given.toy else 1])
        runs = {name: partial(result, *names, case, given.device) for name, case in wanted.items()}
        speeds = {} if given.device == "cpu" else speed(kernels.named(names[0]))
        return going_on(given, {"kernel": names[0], **header, "speed": speeds}, "cases", runs)
    if what == "models":
        kernel, *families = names
        runs = {name: partial(cell, name, given.device, kernel) for name in filter(tiny_models.is_present, families)}
        return going_on(given, gpu.evidence([], given.device, kernel), "architectures", runs)
    runs, missing = {}, {}
    for package, families in FAMILIES.items() if not given.toy else [("fla", FAMILIES["fla"])]:
        try:
            importlib.import_module(package)
        except Exception as error:  # a build for another torch raises errors of many types
            missing[package] = f"{type(error).__name__}: {error}".splitlines()[0]
        if given.toy or package not in missing:
            runs |= {family: partial(measured, family, given.device, given.toy) for family in families}
    return going_on(given, {**header, "missing": missing}, "families", runs)


def going_on(given: argparse.Namespace, header: Any, what: str, runs: Mapping[str, Callable[[], Any]]) -> int:
    until = time.monotonic() + given.seconds
    found = figures.read(given.out)[what] if given.out.exists() else {}
    for name in [name for name in runs if name not in found]:
        if time.monotonic() > until:
            return OUT_OF_TIME
        found[name] = runs[name]()
        figures.write(given.out, {**header, what: found})
    figures.write(given.out, {**header, what: found})
    return 0


def result(name: str, case: Case, device: str) -> dict[str, Any]:
    kernel = kernels.named(name)
    why = refusal(kernel, case, device)
    if why:
        return {"refused": why}
    torch.manual_seed(0)
    try:
        errors = compared(kernel, case, device)
    except Exception as error:  # kernels raise errors of many types
        return {"ok": False, "error": f"{type(error).__name__}: {error}"[:300]}
    relative = {name: float(f"{error.relative:.2e}") for name, error in errors.items()}
    return {"ok": all(error.ok for error in errors.values()), "relative_errors": relative}


# Rows that kernels are timed on: one that the host is slower for than the GPU, and two large ones.
SPEEDS = {"1,300 tokens": (900, 250, 100, 50), "16,384 tokens": (1024,) * 16, "16,384 tokens, short": (64,) * 256}


def speed(kernel: kernels.Kernel, calls: int = 30) -> dict[str, dict[str, float]]:
    # Microseconds of a forward and backward of an attention layer at 7B: of the host, and until the GPU is done.
    found: dict[str, dict[str, float]] = {}
    for name, lengths in SPEEDS.items():
        boundaries = workloads.boundaries_of(lengths)
        boundaries.cu_seqlens = boundaries.cu_seqlens.cuda()
        q, k, v = (torch.randn(sum(lengths), 32, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        states = [tensor.requires_grad_() for tensor in (q, k, v)]

        def call(states: list[torch.Tensor] = states, boundaries: Any = boundaries) -> None:
            output = kernel(states[0], states[1], states[2], boundaries, Options())
            torch.autograd.grad(output, states, output)

        for _ in range(5):
            call()
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(calls):
            call()
        host = time.perf_counter() - started
        torch.cuda.synchronize()
        done = time.perf_counter() - started
        found[name] = {"host_us": round(1e6 * host / calls, 1), "done_us": round(1e6 * done / calls, 1)}
    return found


def cell(family: str, device: str, kernel: str) -> Any:
    # It is None if this Transformers has no such model.
    return gpu.evidence([family], device, kernel)["architectures"].get(family)


# --- hybrids --------------------------------------------------------------------------------------------------


def measured(family: str, device: str, toy: bool) -> dict[str, Any]:
    points = cell(family, device, "reference" if device == "cpu" else "auto")
    found: dict[str, Any] = {"points": points or "this Transformers has no such model", "rows": {}}
    for name, lengths in ({"3 short": (9, 1, 7)} if toy else LENGTHS).items() if points else ():
        try:
            found["rows"][name] = times(family, lengths, 1 if toy else 9, device)
        except Exception as error:  # kernels raise errors of many types
            found["rows"][name] = {"error": f"{type(error).__name__}: {error}"[:300]}
    return found


def times(family: str, lengths: tuple[int, ...], rounds: int, device: str) -> dict[str, Any]:
    # The times are median milliseconds of forward and backward, of rounds in turns. "by_...": the median ratios of the
    # packed time to the others. "padded_is": whether the unpatched model computes the padded batch right, so that the
    # real tokens' logits are those of the documents alone. A padded batch that fails has no time and no ratio.
    patched, single = (
        tiny_models.build(family, dtype=torch.bfloat16, **gpu.big(family)).train().to(device) for _ in range(2)
    )
    patch = fa2patch.apply(patched)
    docs = [doc.to(device) for doc in documents(*lengths)]
    row = {name: tensor.to(device) for name, tensor in pack(documents(*lengths)).items()}
    made = workloads.padded([doc.tolist() for doc in docs])
    batch = {name: made[name].to(device) for name in ("input_ids", "attention_mask")}
    real = batch["attention_mask"].bool()

    def loss(model: Any, kept: Any = ..., **inputs: Any) -> torch.Tensor:
        total: torch.Tensor = model(**inputs, use_cache=False).logits[kept].square().sum()
        return total

    rivals: dict[str, Callable[[], Any]] = {
        "packed": lambda: loss(patched, **row).backward(),
        "one_by_one": lambda: sum(loss(single, input_ids=doc[None]) for doc in docs).backward(),  # type: ignore[union-attr]
        "a_backward_each": lambda: [loss(single, input_ids=doc[None]).backward() for doc in docs],
        "padded": lambda: loss(single, real, **batch).backward(),
    }
    found: dict[str, Any] = {"padded_is": judged(single, docs, batch)}
    if found["padded_is"].startswith("fails"):
        del rivals["padded"]
    taken: dict[str, list[float]] = {name: [] for name in rivals}
    for turn in range(rounds + 1):  # the first one is not timed
        for name, rival in rivals.items():
            started = time.perf_counter()
            rival()
            torch.cuda.synchronize() if device == "cuda" else None
            taken[name] += [time.perf_counter() - started] if turn else []
    found.update({f"{name}_ms": round(1e3 * statistics.median(seconds), 2) for name, seconds in taken.items()})
    for name in [*rivals][1:]:
        ratios = [packed / other for packed, other in zip(taken["packed"], taken[name])]
        found[f"by_{name}"] = round(statistics.median(ratios), 3)
    return {**found, "kernels": sorted({str(layer.kernel) for layer in patch.layers})}


@torch.no_grad()
def judged(model: Any, docs: list[torch.Tensor], batch: dict[str, torch.Tensor]) -> str:
    try:
        found = model(**batch, use_cache=False).logits[batch["attention_mask"].bool()]
    except Exception as error:  # a model's own padded computation may fail in any way
        return f"fails: {type(error).__name__}"
    expected = alone(model, docs)
    off = float((found - expected).abs().max() / expected.abs().max())
    return "right" if off <= NEAR else f"off by {off:.0e}"


# --- training -------------------------------------------------------------------------------------------------

TOY_SCALE = 0.02
SYNC_STEPS = 20  # synchronisations are counted in so many steps


def training_options(parser: argparse.ArgumentParser) -> None:
    # python -m compat_matrix.bench.first_gpu has them, too.
    add = parser.add_argument
    add("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: with --toy only")
    add("--toy", action="store_true", help="tiny models and documents, only to see that it runs; not for figures")
    add("--layers", type=int, help="fewer than the model has")
    add("--optimizer", default="adamw", choices=("adamw", "sgd"))
    add("--documents", type=int, default=16, help="of a mini-batch; few leave a fast GPU waiting for the host")
    add("--steps", type=int, default=12, help="timed steps of each distribution, at most")
    add("--warm-up", type=int, default=3, help="steps before these")


def trained(given: argparse.Namespace, shape: str, variant: str) -> dict[str, Any]:
    # Running out of GPU memory is a result, too.
    names, started = workloads.DISTRIBUTIONS, time.perf_counter()
    try:
        training = Training(given, shape, variant)
        until = {name: started + given.seconds * place / len(names) for place, name in enumerate(names, 1)}
        found = {name: training.on(name, until[name]) for name in names}
    except torch.cuda.OutOfMemoryError as error:
        return {"error": f"out of memory: {str(error).splitlines()[0]}"[:300]}
    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    return {"parameters": parameters, "layers": training.model.config.num_hidden_layers, "distributions": found}


class Training:
    # The weights keep changing, which does not affect speed.

    def __init__(self, given: argparse.Namespace, shape: str, variant: str) -> None:
        self.given, self.shape, self.cuda = given, shape, given.device == "cuda"
        self.kind, _, name = variant.partition(":")
        name, _, lengths = name.partition("+")
        self.lengths = bool(lengths)
        self.by_hand = workloads.ByHand(kernels.named(name)) if self.kind == "by-hand" else None
        self.model = build(given, shape, {"by-hand": workloads.BY_HAND, "fa2patch": "sdpa"}.get(self.kind, name))
        if self.kind == "fa2patch":
            fa2patch.apply(self.model, kernel=name)
        # AdamW's states have the weights' dtype: a bfloat16 weight takes 8 bytes with its gradient and states, SGD's 4
        weights = self.model.parameters()
        adamw = given.optimizer == "adamw"
        self.optimizer = torch.optim.AdamW(weights, 1e-5, fused=self.cuda) if adamw else torch.optim.SGD(weights, 1e-5)

    def on(self, distribution: str, until: float) -> dict[str, Any]:
        # Every variant gets the same documents.
        drawn = workloads.DISTRIBUTIONS[distribution].scaled(TOY_SCALE if self.given.toy else 1)
        lengths = workloads.mini_batches(drawn, self.given.steps + self.given.warm_up, self.given.documents)
        largest = max(range(len(lengths)), key=lambda step: len(lengths[step]) * max(lengths[step]))
        lengths.insert(0, lengths.pop(largest))  # so that no timed step waits for memory
        docs = workloads.filled(lengths, workloads.config(self.shape, toy=self.given.toy).vocab_size)
        pad = self.kind == "padded"
        batches = [
            (workloads.padded(each) if pad else workloads.packed(each, self.lengths), cuts)
            for each, cuts in zip(docs, lengths)
        ]
        timed = lengths[self.given.warm_up :]
        return {
            **self.timed(batches, until),
            "real_tokens": [sum(cuts) for cuts in timed],
            "padded_tokens": [len(cuts) * max(cuts) for cuts in timed],
            **({"synchronisations": self.synchronisations(batches[:SYNC_STEPS])} if self.cuda else {}),
        }

    def timed(self, batches: list[Any], until: float) -> dict[str, Any]:
        warm_up, marks, losses = self.given.warm_up, [], []
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        for step, (batch, cuts) in enumerate(batches):
            if step == warm_up:
                marks.append(self._mark())
            loss = self.model(**self._moved(batch, cuts), use_cache=False).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
            if step >= warm_up:
                marks.append(self._mark())
            if step > warm_up and step % 4 == 0:  # without it the host would run ahead of the GPU and miss the limit
                torch.cuda.synchronize() if self.cuda else None
                if time.perf_counter() > until:
                    break
        if self.cuda:
            torch.cuda.synchronize()
        return {
            "step_seconds": [a.elapsed_time(b) / 1e3 if self.cuda else b - a for a, b in zip(marks, marks[1:])],
            "peak_bytes": torch.cuda.max_memory_allocated() if self.cuda else 0,
            "losses": [round(float(loss), 5) for loss in losses],
        }

    def _mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _moved(self, batch: dict[str, Any], cuts: list[int]) -> dict[str, Any]:
        if self.by_hand is not None:
            self.by_hand.boundaries = made = workloads.boundaries_of(cuts)
            made.cu_seqlens = made.cu_seqlens.to(self.given.device)
        return {k: x.to(self.given.device) if isinstance(x, torch.Tensor) else x for k, x in batch.items()}

    def synchronisations(self, batches: list[Any]) -> dict[str, Any]:
        # These are warnings of torch's sync debug mode. The backward, which recomputes the forward, is counted apart.
        places: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}
        for batch, cuts in batches:
            moved = self._moved(batch, cuts)
            loss = warned(places["forward"], lambda moved=moved: self.model(**moved, use_cache=False).loss)
            warned(places["backward"], loss.backward)
            self.optimizer.zero_grad(set_to_none=True)
        return {
            when: {"per_step": sum(counter.values()) / len(batches), "where": dict(counter.most_common(8))}
            for when, counter in places.items()
        }


def warned(places: Counter[str], call: Any) -> Any:
    # Warnings are counted by the file and line that torch attributes them to.
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            return call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
            places.update(
                place(one.filename, one.lineno) for one in seen if "called a synchronizing" in str(one.message)
            )


def place(file: str, number: int) -> str:
    # It is such as "package/module.py:12", without this machine's path to its packages.
    parts = re.split(r"(?:site|dist)-packages/", file.replace(os.sep, "/"))
    return f"{parts[-1] if len(parts) > 1 else '/'.join(parts[-1].split('/')[-2:])}:{number}"


def build(given: argparse.Namespace, shape: str, implementation: str) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = workloads.config(shape, given.layers, given.toy)
    with torch.device(given.device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    model = model.to(torch.bfloat16).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


if __name__ == "__main__":
    sys.exit(main())
