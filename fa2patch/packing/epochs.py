"""The rows of all ranks in an epoch, in the order of its steps. The ranks of a step have similar costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .plans import Plan
from .strategies import Ints, by_key

Floats = npt.NDArray[np.float64]
_NONE = np.empty(0, np.int64)


@dataclass(frozen=True)
class Epoch:
    """The rows of an epoch. The row of rank r in step s has the number ``s * ranks + r``.

    Attributes:
        indices: Examples of all rows, row after row.
        offsets: Start of each row in ``indices``, and the end, ``[rows + 1]``.
        repeated: Examples that are repeated in the last step, once for each repetition.
        left_out: Examples that are in no row.
    """

    indices: Ints
    offsets: Ints
    repeated: Ints
    left_out: Ints

    def row(self, number: int) -> list[int]:
        """Return the examples of one row."""
        found: list[int] = self.indices[self.offsets[number] : self.offsets[number + 1]].tolist()
        return found


def of_plan(
    plan: Plan, costs: Floats, ranks: int, window: int, seed: Sequence[int], drop_last: bool, ordered: bool
) -> Epoch:
    """Put the plan's rows into steps of similar costs or, if ``ordered``, keep them in their order.

    If the last step is incomplete and not dropped, its rows are divided among all ranks. ``costs`` are the examples',
    ``window`` is the number of steps among which rows are exchanged, and ``seed`` is the plan's.
    """
    rng = np.random.default_rng([*seed, 1])  # not ``seed`` alone: the plan was drawn with it
    rows, rest, sizes = np.arange(len(plan)), len(plan) % ranks, np.diff(plan.offsets)
    if not ordered and drop_last:
        rows = rng.permutation(rows)
    elif not ordered:  # rows of many examples come last: they are the easiest to divide
        rows = np.argsort(sizes, kind="stable")
    taken = rest if drop_last or not rest else _divisible(sizes[rows], rest, ranks)
    full, last = rows[: len(rows) - taken], [plan[row] for row in rows[len(rows) - taken :].tolist()]
    if not ordered:
        of_rows = np.add.reduceat(costs[plan.indices], plan.offsets[:-1]) if len(plan) else costs[:0]
        full = full[_alike(of_rows[full], ranks, window, rng).ravel()]
    indices, counts = _taken(plan, full)
    if not rest or drop_last:
        return Epoch(indices, _offsets(counts), _NONE, np.sort(np.concatenate([_NONE, *last])))
    parts = _shared_out(np.concatenate(last), costs, ranks) if taken == rest and not ordered else []
    if not parts or max(int(plan.lengths[part].sum()) for part in parts) > plan.max_tokens:
        parts = _spread(last, costs, taken - rest + ranks)
    again = [parts[number % len(parts)] for number in range(-len(parts) % ranks)]
    ends = [*parts, *again]
    counts = np.concatenate([counts, [len(part) for part in ends]])
    return Epoch(np.concatenate([indices, *ends]), _offsets(counts), np.sort(np.concatenate([_NONE, *again])), _NONE)


def _divisible(sizes: Ints, rest: int, ranks: int) -> int:
    """Return how many rows from the end to divide so that every rank gets a row in the last step.

    The number is ``rest`` plus whole steps, or only ``rest`` if all rows together hold too few examples.
    """
    surplus = np.cumsum(sizes[::-1] - 1)
    enough = int(np.searchsorted(surplus, ranks - rest)) + 1
    if enough > len(sizes):
        return rest
    return rest + -(-max(enough - rest, 0) // ranks) * ranks


def of_mini_batches(costs: Floats, batch_size: int, ranks: int, seed: Sequence[int], drop_last: bool) -> Epoch:
    """Make steps of ``batch_size * ranks`` examples in random order, distributed to the ranks by cost.

    An incomplete last step is kept unless ``drop_last``; examples are repeated in it if there are fewer than ranks.
    """
    rng = np.random.default_rng(seed)
    drawn, each = rng.permutation(len(costs)), batch_size * ranks
    rest = drawn[len(drawn) // each * each :]
    left_out = again = _NONE
    if drop_last:
        left_out, rest = np.sort(rest), _NONE
    elif 0 < len(rest) < ranks:
        again = np.resize(drawn, ranks - len(rest))
    batches = drawn[: len(drawn) // each * each].reshape(-1, each)
    dealt = [_rows_by_cost(batches, costs, ranks, rng), _rows_by_cost(np.append(rest, again)[None], costs, ranks, rng)]
    steps = np.cumsum([0, len(batches)])
    row_of = np.concatenate([rank_of + first * ranks for rank_of, first in zip(dealt, steps)])
    order = by_key(row_of.astype(np.int32))
    counts = np.bincount(row_of)
    return Epoch(np.concatenate([batches.ravel(), rest, again])[order], _offsets(counts), np.sort(again), left_out)


def _rows_by_cost(batches: Ints, costs: Floats, ranks: int, rng: np.random.Generator) -> Ints:
    """Return the row of each example ``[batches, n]``, flattened. Ranks are permuted at random in each batch."""
    rank_of = _cheapest_share(costs[batches], ranks)
    names = rng.permuted(np.tile(np.arange(ranks), (len(batches), 1)), axis=1)
    rank_of = np.take_along_axis(names, rank_of, axis=1)
    found: Ints = (rank_of + ranks * np.arange(len(batches))[:, None]).ravel()
    return found


def _taken(plan: Plan, rows: Ints) -> tuple[Ints, Ints]:
    """Return the examples of these rows in their order, and the number of examples in each row."""
    counts = np.diff(plan.offsets)[rows]
    first = np.repeat(plan.offsets[rows] - (np.cumsum(counts) - counts), counts)
    return plan.indices[first + np.arange(len(first))], counts


def _offsets(counts: Ints) -> Ints:
    return np.append(0, np.cumsum(counts))


def _alike(costs: Floats, ranks: int, window: int, rng: np.random.Generator) -> Ints:
    """Return row numbers ``[steps, ranks]`` such that the rows of a step have similar costs.

    Rows are shuffled and divided into windows of ``window`` steps. Each window is sorted by cost, and neighbours share
    a step. The order of all steps, and of the ranks in a step, is random. The rows must be a multiple of the ranks.
    """
    drawn = rng.permutation(len(costs))
    among = [drawn[start : start + window * ranks] for start in range(0, len(drawn), window * ranks)]
    by_cost = [rows[np.argsort(costs[rows], kind="stable")] for rows in among]
    steps = np.concatenate([*by_cost, drawn[:0]]).reshape(-1, ranks)
    return rng.permuted(steps[rng.permutation(len(steps))], axis=1)


def _cheapest_share(costs: Floats, ranks: int) -> Ints:
    """Return the rank of each example, ``[batches, n]``, from their costs.

    The costliest example comes first, and each goes to the rank with the lowest cost so far. With at least as many
    examples as ranks, every rank gets one.
    """
    batches = np.arange(len(costs))
    load = np.zeros((len(costs), ranks))
    rank_of = np.empty(costs.shape, np.int64)
    for nth in np.argsort(-costs, axis=1, kind="stable").T:
        least = load.argmin(axis=1)
        rank_of[batches, nth] = least
        load[batches, least] += costs[batches, nth]
    return rank_of


def _shared_out(examples: Ints, costs: Floats, ranks: int) -> list[Ints]:
    """Return the examples of each rank, balanced by cost, or an empty list if there are fewer examples than ranks."""
    if len(examples) < ranks:
        return []
    rank_of = _cheapest_share(costs[examples][None], ranks)[0]
    return [examples[rank_of == rank] for rank in range(ranks)]


def _spread(rows: Sequence[Ints], costs: Floats, into: int) -> list[Ints]:
    """Divide rows into ``into`` rows, keeping the order, by repeatedly cutting the costliest divisible row in two.

    There are fewer than ``into`` rows if there are fewer examples.
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
