"""Distribution of rows and examples over steps and ranks, so that all ranks of a step have similar costs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .strategies import Ints

Floats = npt.NDArray[np.float64]


def alike(costs: Floats, ranks: int, window: int, rng: np.random.Generator) -> Ints:
    """Return row numbers ``[steps, ranks]`` such that the rows of a step have similar costs.

    Rows are shuffled and divided into windows of ``window`` steps. Each window is sorted by cost, and neighbours share
    a step. The order of all steps, and of the ranks in a step, is random.

    Args:
        costs: Cost of each row, ``[rows]``. The number of rows must be a multiple of ``ranks``.
    """
    drawn = rng.permutation(len(costs))
    among = [drawn[start : start + window * ranks] for start in range(0, len(drawn), window * ranks)]
    by_cost = [rows[np.argsort(costs[rows], kind="stable")] for rows in among]
    steps = np.concatenate([*by_cost, drawn[:0]]).reshape(-1, ranks)
    return rng.permuted(steps[rng.permutation(len(steps))], axis=1)


def cheapest_share(costs: Floats, ranks: int) -> Ints:
    """Return the rank of each example, ``[batches, n]``.

    The costliest example comes first, and each goes to the rank with the lowest cost so far. With at least as many
    examples as ranks, every rank gets one.

    Args:
        costs: Cost of each example, ``[batches, n]``.
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
    """Return the examples of each rank, balanced by cost, or an empty list if there are fewer examples than ranks.

    Args:
        examples: Indices of the examples to share out.
        costs: Cost of each example of the dataset.
    """
    if len(examples) < ranks:
        return []
    rank_of = cheapest_share(costs[examples][None], ranks)[0]
    return [examples[rank_of == rank] for rank in range(ranks)]


def spread(rows: Sequence[Ints], costs: Floats, into: int) -> list[Ints]:
    """Divide rows into ``into`` rows, keeping the order, by repeatedly cutting the costliest divisible row in two.

    There are fewer than ``into`` rows if there are fewer examples.

    Args:
        rows: Indices of the examples of each row.
        costs: Cost of each example of the dataset.
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
