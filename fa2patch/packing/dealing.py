"""Rows -> steps, so that the ranks of a step have about as much to do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .strategies import Ints

Floats = npt.NDArray[np.float64]


def alike(costs: Floats, ranks: int, window: int, rng: np.random.Generator) -> Ints:
    """Row numbers ``[steps, ranks]`` of all rows: those of a step cost about as much as one another.

    Within each ``window`` steps of rows in a random order, neighbours by cost share a step.

    Args:
        costs: of as many rows as full steps take.
    """
    drawn = rng.permutation(len(costs))
    among = [drawn[start : start + window * ranks] for start in range(0, len(drawn), window * ranks)]
    by_cost = [rows[np.argsort(costs[rows], kind="stable")] for rows in among]
    steps = np.concatenate([*by_cost, drawn[:0]]).reshape(-1, ranks)
    return rng.permuted(steps[rng.permutation(len(steps))], axis=1)


def cheapest_share(costs: Floats, ranks: int) -> Ints:
    """Examples ``[batches, n]`` -> the rank of each: the costliest first, each to the rank with the least so far.

    With at least as many examples as ranks, every rank gets one.
    """
    batches = np.arange(len(costs))
    load = np.zeros((len(costs), ranks))
    rank_of = np.empty(costs.shape, np.int64)
    for nth in np.argsort(-costs, axis=1, kind="stable").T:
        least = load.argmin(axis=1)
        rank_of[batches, nth] = least
        load[batches, least] += costs[batches, nth]
    return rank_of


def shared_out(examples: Ints, costs: Floats, ranks: int) -> list[Ints]:
    """These examples by rank, by cost; none where there are fewer than ranks. ``costs`` are those of all examples."""
    if len(examples) < ranks:
        return []
    rank_of = cheapest_share(costs[examples][None], ranks)[0]
    return [examples[rank_of == rank] for rank in range(ranks)]


def spread(rows: Sequence[Ints], costs: Floats, into: int) -> list[Ints]:
    """The examples of these rows as ``into`` rows, in the same order: again and again the costliest is cut in two.

    Fewer than ``into`` where there are fewer examples. ``costs`` are those of all examples.
    """
    parts = list(rows)
    while len(parts) < into:
        divisible = [place for place, part in enumerate(parts) if len(part) > 1]
        if not divisible:
            break
        place = max(divisible, key=lambda at: float(costs[parts[at]].sum()))
        part = parts[place]
        until = np.cumsum(costs[part])
        middle = int(np.abs(2 * until[:-1] - until[-1]).argmin()) + 1
        parts[place : place + 1] = [part[:middle], part[middle:]]
    return parts
