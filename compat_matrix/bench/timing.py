"""Time rival computations in turns, so that other load on the machine affects all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any, Callable

import torch


def rounds(
    rivals: Mapping[str, Callable[[], Any]], repeats: int, warm_up: int = 2, device: str = "cpu"
) -> dict[str, list[float]]:
    """Return the seconds of each rival, round by round. The order rotates; warm-up rounds are not timed.

    Args:
        device: with ``cuda`` the time ends when the GPU has computed everything.
    """
    names = list(rivals)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-warm_up, repeats):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            started = time.perf_counter()
            rivals[name]()
            if device == "cuda":
                torch.cuda.synchronize()
            if turn >= 0:
                taken[name].append(time.perf_counter() - started)
    return taken


def summary(seconds: list[float]) -> dict[str, float]:
    """Return the least time and the median in milliseconds. Tables show the median."""
    return {"min_ms": round(1e3 * min(seconds), 4), "median_ms": round(1e3 * statistics.median(seconds), 4)}


def line(xs: list[float], ys: list[float]) -> tuple[float, float]:
    """Return slope and intercept of the least-squares line. Errors are relative to ``xs``, as noise grows with them."""
    weights = [x**-2 for x in xs]
    total = sum(weights)
    middle, height = (sum(w * value for w, value in zip(weights, values)) / total for values in (xs, ys))
    spread = sum(w * (x - middle) ** 2 for w, x in zip(weights, xs))
    slope = sum(w * (x - middle) * (y - height) for w, x, y in zip(weights, xs, ys)) / spread
    return slope, height - slope * middle
