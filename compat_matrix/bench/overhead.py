"""Part ``overhead``: the host time of the patch itself, in microseconds per layer and per forward.

A patched Llama is compared with the same Llama whose layers call the same kernel with precomputed boundaries. Both run
in turns, so the difference of two neighbouring forwards leaves out the kernel, the projections and most of the
machine's other load. The medians of the differences over models of 2 to 32 layers lie on a line: its slope is the cost
per layer, its intercept the cost per forward (recognising the packed batch, with or without its lengths). The slope
averages over thousands of layer calls and is more robust than timing one call of a microsecond. ``call`` times that one
call as a check: ``packed_attention`` against the kernel alone.
"""

from __future__ import annotations

import statistics
import timeit
from typing import Any

import torch
from rich.progress import Progress

import fa2patch
from fa2patch.kernels.attention import Options, packed_attention
from fa2patch.kernels.reference import Reference

from . import timing
from .kernels import ready
from .models import BY_HAND, ByHand, small_llama

WAYS = ("position_ids", "lengths")
LAYERS = (2, 4, 8, 16, 32)
QUICK_LAYERS = (2, 4)
HIDDEN = 64
DOCUMENTS = (9, 7)
QUARTERS = 4


def measure(progress: Progress, quick: bool = False, repeats: int = 160) -> Any:
    """Measure all layer counts and return the result of the part.

    Args:
        repeats: rounds of the largest model; smaller models get proportionally more.
    """
    layers = QUICK_LAYERS if quick else LAYERS
    repeats = QUARTERS if quick else repeats
    task = progress.add_task("overhead", total=len(layers))
    forwards, differences = [], []
    for count in layers:
        made = repeats * (1 if quick else layers[-1] // count)
        differences.append(more(count, made))
        medians = {name: round(statistics.median(values), 1) for name, values in differences[-1].items()}
        forwards.append({"layers": count, "rounds": made, **medians})
        progress.update(task, advance=1)
    fits = {way: fitted(list(map(float, layers)), [of[f"{way}_us"] for of in differences]) for way in WAYS}
    return {
        "documents": list(DOCUMENTS),
        "hidden_size": HIDDEN,
        **fits,
        "call": call(10 if quick else 2000),
        "forwards": forwards,
    }


def fitted(layers: list[float], differences: list[list[float]]) -> dict[str, Any]:
    """Return slope and intercept through the medians, and their range over four quarters of the rounds."""
    slope, intercept = timing.line(layers, list(map(statistics.median, differences)))
    quarters = [
        timing.line(layers, [statistics.median(values[part::QUARTERS]) for values in differences])
        for part in range(QUARTERS)
    ]
    slopes, intercepts = zip(*quarters)
    return {
        "us_per_layer": round(slope, 1),
        "us_per_layer_range": [round(min(slopes), 1), round(max(slopes), 1)],
        "us_per_forward": round(intercept, 1),
        "us_per_forward_range": [round(min(intercepts), 1), round(max(intercepts), 1)],
    }


def more(layers: int, repeats: int) -> dict[str, list[float]]:
    """Return for every round by how many microseconds the patched forward exceeds the other, and the other's time."""
    kernel = Reference()
    by_hand = ByHand(kernel)
    by_hand.register()
    by_hand.boundaries = ready(list(DOCUMENTS))
    patched, bare = (small_llama(layers, HIDDEN, name).eval() for name in ("sdpa", BY_HAND))
    fa2patch.apply(patched, kernel=kernel.name)
    with_lengths = row(lengths=True)
    plain = {name: with_lengths[name] for name in ("input_ids", "position_ids")}
    with torch.no_grad():
        taken = timing.rounds(
            {
                "by_hand": lambda: bare(**plain),
                "position_ids": lambda: patched(**plain),
                "lengths": lambda: patched(**with_lengths),
            },
            repeats,
            warm_up=max(2, repeats // 10),
        )
    found = {f"{way}_us": [1e6 * (a - b) for a, b in zip(taken[way], taken["by_hand"])] for way in WAYS}
    return {**found, "by_hand_us": [1e6 * seconds for seconds in taken["by_hand"]]}


def row(lengths: bool) -> dict[str, Any]:
    """Return the packed batch of ``DOCUMENTS``, with or without the collator's lengths."""
    collate = fa2patch.DataCollatorWithFlattening(return_flash_attn_kwargs=lengths)
    batch = collate([{"input_ids": list(range(3, 3 + length))} for length in DOCUMENTS])
    return {name: value for name, value in batch.items() if name != "labels"}


def call(number: int) -> dict[str, float]:
    """Return the microseconds of one call on a tiny row: the median of seven series."""
    kernel, cuts, options = Reference(), ready(list(DOCUMENTS)), Options()
    q = torch.randn(1, sum(DOCUMENTS), 2, 32)
    k = v = torch.randn(1, sum(DOCUMENTS), 1, 32)
    rivals = {
        "packed_attention": lambda: packed_attention(q, k, v, cuts, options, kernel.name),
        "kernel": lambda: kernel(q[0], k[0], v[0], cuts, options),
    }
    series = {name: timeit.Timer(function) for name, function in rivals.items()}
    taken: dict[str, list[float]] = {name: [] for name in rivals}
    for _ in range(7):
        for name, timer in series.items():
            taken[name].append(timer.timeit(number) / number)
    return {f"{name}_us": round(1e6 * statistics.median(seconds), 2) for name, seconds in taken.items()}
