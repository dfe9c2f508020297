"""DPOTrainer as it is and packed, for models of several sizes: from which size on packing pays."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from .. import environments
from ..ecosystem.stacks import stacks

STACK = "trl-1.16.0"
SIZES = {"2 layers of 64": (2, 64), "4 layers of 256": (4, 256), "12 layers of 768": (12, 768)}
STEPS = 12
TRIED = (1, 2, 4, 8)  # batches with which fa2patch tries whether something reads padding


@pytest.mark.parametrize("size", SIZES)
def bench_preferences(rows: Any, quick: bool, folder: Path, size: str) -> None:
    """Eleven steps of DPOTrainer: padded, packed with shared prompts, and packed without.

    A Qwen2 with its reference, float32 and sdpa, one thread, eight pairs in a batch; prompts of 5 to 40 tokens, answers
    of 5 to 120. Each batch is computed in the three ways, one after another. *step*: a step of padded training, and
    *packed* and *prompts apart* how long one takes to it, the median of the batches with which nothing is tried. *all*:
    the eleven steps packed to those padded, with the four batches (1, 2, 4 and 8) with which fa2patch tries whether
    something reads padding. *operators*: how many torch starts in a step, without views, padded and packed.
    """
    if quick:
        return  # the environment of a quick run has no TRL
    wanted = stacks()[STACK]
    python = environments.make(wanted.environment, folder)
    rows.on = " with ".join(f"{name} {wanted.pins[name]}" for name in ("trl", "transformers"))
    with environments.only_our_packages() as ours:
        given = ("compat_matrix.bench.preferences", *map(str, (*SIZES[size], STEPS)))
        found = json.loads(environments.printed(*given, python=python, packages=ours).splitlines()[-1])
    seconds, started = found["seconds"], found["operators"]
    later = [at for at in range(STEPS - 1) if at + 1 not in TRIED]

    def ratio(way: str) -> str:
        return f"{statistics.median(seconds[way][at] / seconds['padded'][at] for at in later):.2f}"

    rows.append({
        "model": size,
        "step, s": f"{statistics.median(seconds['padded'][at] for at in later):.3g}",
        "packed": ratio("packed"),
        "prompts apart": ratio("prompts apart"),
        "all": f"{sum(seconds['packed']) / sum(seconds['padded']):.2f}",
        "operators": f"{started['padded']:,} and {started['packed']:,}",
    })  # fmt: skip
