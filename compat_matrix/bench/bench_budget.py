"""Trainers with a budget of tokens beside the same trainers padded: how far apart, how many passes, what memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from .. import commits, environments
from ..ecosystem.stacks import stacks
from .budget import OWN, PADDED

# The loss of TRL 1.16 reserves half a MB for each token, for any vocabulary: more than all else of a tiny model.
STACK = "trl-0.19.1"

KINDS = {
    "trainer": "Trainer",
    "any": "Trainer, a loss that is not known",
    "router": "Trainer, a router loss",
    "sft": "SFTTrainer",
    "dpo": "DPOTrainer",
    "kto": "KTOTrainer",
    "grpo": "GRPOTrainer",
}
# budgets, by the part that they are of a mean batch's tokens
PARTS = {"2": 2.0, "1": 1.0, "1/2": 0.5}


@pytest.fixture
def stack(quick: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    # The function trains one trainer one way, in a process of the stack.
    wanted = stacks()[STACK]
    python = environments.make(wanted.environment, folder)
    tests = commits.ROOT / "tests"
    for name, value in wanted.variables.items():
        monkeypatch.setenv(name, value)

    def run(kind: str, way: str, along: str = "") -> dict[str, Any]:
        out = tmp_path / f"{way}{'-in-bf16' if along else ''}.pt"
        told = (kind, way, "4" if quick else "50", str(out), *([str(tmp_path / f"{along}.pt")] if along else []))
        with environments.only_our_packages() as ours:
            path = (ours, tests / "helpers", tests / "integrations" / "scripts")
            monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, path)))
            environments.printed("compat_matrix.bench.budget", *told, python=python)
        return dict(torch.load(out))

    return run


@pytest.mark.parametrize("kind", KINDS)
def bench_budget(rows: Any, quick: bool, stack: Any, kind: str) -> None:
    """Fifty steps padded, and with budgets of twice, once and half the tokens of a mean batch, in float32.

    The trainers of the tests: a tiny Llama, or a tiny Mixtral with a router loss, batches of 4 (SFT, KTO), 4 pairs
    (DPO) and 8 (the others); GRPO has its default loss, completions drawn in advance, and two batches for each of its
    steps. Only Trainer's own loss is computed pass by pass; all others see the whole batch. *Operations*: those of
    matrix products and attention in the first five batches, as torch counts them, to those of padded ones. *Losses*
    and *weights*: the largest difference to padded training. A peak is the most bytes of tensors that a batch has in
    use beyond those before it, as the allocator records them, in a process of its own: *peak* is that of the median
    batch, *largest* that of the worst. Code that fa2patch does not know is tried in some of the first batches, which
    is in *largest*. *bf16*: how far the gradients of a batch in bf16 are from those of padded float32 training,
    divided by how far padded bf16 is from them, both at the weights of the float32 training; the median of the
    batches.
    """
    if quick and kind not in OWN:
        return  # the environment of a quick run has no TRL
    rows.on = " with ".join(f"{name} {stacks()[STACK].pins[name]}" for name in ("trl", "transformers"))
    padded = stack(kind, PADDED)
    rounded = off(stack(kind, PADDED, along=PADDED), padded)
    for part, times in {PADDED: 0.0, **PARTS}.items():
        budget = round(times * padded["tokens"])
        found = stack(kind, f"budget{budget}") if times else padded
        row = {"trainer": KINDS[kind], "batches": part, "tokens": budget or "", "steps": found["steps"]}
        row |= {"passes": f"{found['passes']:.2f}", "peak, MB": f"{np.median(found['peaks']) / 1e6:.1f}"}
        row["operations"] = f"{found['operations'] / padded['operations']:.2f}"
        row |= {"largest, MB": f"{max(found['peaks']) / 1e6:.1f}", "losses": "", "weights": "", "bf16": ""}
        if times:
            row["losses"] = f"{max(abs(a - b) for a, b in zip(found['losses'], padded['losses'])):.0e}"
            apart = ((found["weights"][name] - each).abs().max() for name, each in padded["weights"].items())
            row["weights"] = f"{float(max(apart)):.0e}"
            in_bf16 = off(stack(kind, f"budget{budget}", along=PADDED), padded) / rounded
            row["bf16"] = f"{np.median(in_bf16):.2f}"
        rows.append(row)


def off(found: dict[str, Any], padded: dict[str, Any]) -> npt.NDArray[np.float64]:
    # Each batch has the norm of the difference.
    pairs = zip(found["gradients"], padded["gradients"], strict=True)
    far = [sum(float((one[name] - each).square().sum()) for name, each in other.items()) for one, other in pairs]
    return np.sqrt(far)
