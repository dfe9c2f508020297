"""The rows of all ranks in an epoch, in the order of its steps. The ranks of a step have similar costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .plans import Plan
from .strategies import Floats, Ints, by_key, dealt, divided

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True)
class Epoch:
    """The rows of an epoch. The row of rank r in step s has the number ``s * ranks + r``."""

    indices: Ints  # examples of all rows, row after row
    offsets: Ints  # [rows + 1]: start of each row in ``indices``, and the end
    repeated: Ints  # examples in the last step, once for each repetition
    left_out: Ints  # examples in no row
    passes: Ints  # [steps]: in how many passes the rows of a step are computed

    def row(self, number: int) -> list[int]:
        found: list[int] = self.indices[self.offsets[number] : self.offsets[number + 1]].tolist()
        return found


def of_plan(
    plan: Plan,
    costs: Floats,  # of the examples
    ranks: int,
    window: int,  # the number of steps among which rows are exchanged
    seed: Sequence[int],
    drop_last: bool,  # otherwise the rows of an incomplete last step are divided among all ranks
    ordered: bool,
) -> Epoch:
    """Put the plan's rows into steps of similar costs or, if ``ordered``, keep them in their order."""
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
    # the places of the full rows' examples in the plan
    counts = sizes[full]
    places = np.repeat(plan.offsets[full] - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())

    left_out, parts, again = _NONE, list[Ints](), list[Ints]()
    if drop_last:
        left_out = np.sort(np.concatenate([_NONE, *last]))
    elif rest:
        examples = np.concatenate(last)
        # other rows of them, if one for each rank will do
        if taken == rest and not (ordered or plan.of_pairs) and len(examples) >= ranks:
            found = dealt(plan.lengths[examples], costs[examples], ranks, plan.max_tokens)
            parts = [examples[found.pass_of == rank] for rank in range(ranks)] if found.passes == 1 else []
        parts = parts or divided(last, costs, taken - rest + ranks)
        again = [parts[number % len(parts)] for number in range(-len(parts) % ranks)]
    counts = np.append(counts, np.array([len(part) for part in parts + again], np.int64))
    indices = np.concatenate([plan.indices[places], *parts, *again])
    passes = np.ones(len(counts) // ranks, np.int64)
    return Epoch(indices, _offsets(counts), np.sort(np.concatenate([_NONE, *again])), left_out, passes)


def _divisible(sizes: Ints, rest: int, ranks: int) -> int:
    """How many rows from the end to divide so that every rank gets a row in the last step."""
    surplus = np.cumsum(sizes[::-1] - 1)
    enough = int(np.searchsorted(surplus, ranks - rest)) + 1
    if enough > len(sizes):
        return rest
    # The last step may need whole steps before it, if its own rows hold too few examples.
    return rest + -(-max(enough - rest, 0) // ranks) * ranks


def of_mini_batches(
    examples: Ints, each: int, seed: Sequence[int], drop_last: bool, sizes: Ints, costs: Floats, ranks: int, budget: int
) -> Epoch:
    # The first four arguments say which examples a step holds, and the others only who computes them, and in how many
    # passes. Sizes and costs are those of the whole dataset.
    rng = np.random.default_rng(seed)
    drawn = examples[rng.permutation(len(examples))]
    whole = len(drawn) // each * each
    steps, rest, left_out, again = list(drawn[:whole].reshape(-1, each)), drawn[whole:], _NONE, _NONE
    if drop_last:
        left_out = np.sort(rest)
    elif len(rest):
        again = np.resize(drawn, max(ranks - len(rest), 0))
        steps.append(np.append(rest, again))
    names = rng.permuted(np.tile(np.arange(ranks), (len(steps), 1)), axis=1)
    rows, row_of, passes = [_NONE], [_NONE], []
    for first, (step, name) in enumerate(zip(steps, names)):
        found = dealt(sizes[step], costs[step], ranks, budget)
        rows.append(step[found.order])
        row_of.append(name[found.pass_of // found.passes][found.order] + first * ranks)
        passes.append(found.passes)
    order = by_key(np.concatenate(row_of).astype(np.int32))
    offsets = _offsets(np.bincount(np.concatenate(row_of), minlength=len(steps) * ranks))
    return Epoch(np.concatenate(rows)[order], offsets, np.sort(again), left_out, np.array(passes, np.int64))


def _offsets(counts: Ints) -> Ints:
    return np.append(0, np.cumsum(counts))


def _alike(costs: Floats, ranks: int, window: int, rng: np.random.Generator) -> Ints:
    """Row numbers ``[steps, ranks]``, such that the rows of a step have similar costs."""
    # The order is random otherwise. The number of rows must be a multiple of the ranks.
    drawn = rng.permutation(len(costs))
    among = [drawn[start : start + window * ranks] for start in range(0, len(drawn), window * ranks)]
    by_cost = [rows[np.argsort(costs[rows], kind="stable")] for rows in among]
    steps = np.concatenate([*by_cost, drawn[:0]]).reshape(-1, ranks)
    return rng.permuted(steps[rng.permutation(len(steps))], axis=1)
