"""Deal the examples of a global batch to ranks that make the same number of passes, each within a budget of tokens."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import PackingError
from .budget import as_lengths, capped, check_budget, without_tokens
from .strategies import ENOUGH, Ints, fewest, fewest_rows, in_order

Floats = npt.NDArray[np.float64]

ATTENTION_COST = 1 / (12 * 4096)
"""Default cost of attention over a document of l tokens, per l**2: 1 / (12 x hidden size).

The unit is the cost of everything else for one token. A forward takes 2 x 12 x layers x hidden**2 operations per token,
and causal attention takes 2 x layers x hidden x l per token on average (arXiv 2001.08361, section 2.1). The backward
takes twice as many of both. The hidden size is 4096, as in models of 7-8B.
"""


def example_costs(lengths: Ints, attention_cost: float = ATTENTION_COST) -> Floats:
    """Return ``lengths + attention_cost * lengths**2``, ``[examples]``. A row's cost is the sum over its documents."""
    return lengths + attention_cost * np.square(lengths, dtype=np.float64)


@dataclass(frozen=True, eq=False, repr=False)
class Deal:
    """What each rank computes of a global batch, and in which passes.

    Every rank has the same number of passes. Each example with tokens is in one pass of one rank. A pass is empty only
    if its rank has fewer examples than passes. The last passes of a rank are then the empty ones, and the rank must run
    them all the same, with a loss of weight zero, because the others wait for it in them (FSDP, ZeRO-3).

    Attributes:
        passes: Examples of each pass of each rank, int64 ``[examples]``, in the order of ``batches``. A rank's
            costliest pass comes first.
        batches: Examples of each rank, int64 ``[examples]``, in the order in which ``deal(lengths[batch], 1,
            max_tokens, passes=number)`` makes just these passes.
        costs: Cost of each pass, float64 ``[ranks, passes]``, in units of the cost of a token without attention.
        fewest_passes: Lower bound on the number of passes in any deal of these examples.
        least_cost: Lower bound on the cost of the costliest rank in any deal of these examples.
        empty: Examples that are in no pass because they have no tokens, int64 ``[examples]``.
    """

    passes: list[list[Ints]]
    batches: list[Ints]
    costs: Floats
    fewest_passes: int
    least_cost: float
    empty: Ints

    def __len__(self) -> int:
        """Number of passes that each rank makes."""
        return int(self.costs.shape[1])

    def __repr__(self) -> str:
        ranks, passes = self.costs.shape
        most = self.costs.sum(axis=1).max()
        left_out = f", {len(self.empty)} examples empty" if len(self.empty) else ""
        return (
            f"<Deal: {ranks} ranks, {passes} passes each (at least {self.fewest_passes}), costliest rank {most:.0f} "
            f"(at least {self.least_cost:.0f}){left_out}>"
        )


def deal(
    lengths: Sequence[int] | npt.NDArray[Any],
    ranks: int,
    max_tokens: int,
    *,
    passes: int | None = None,
    attention_cost: float = ATTENTION_COST,
    too_long: str = "error",
) -> Deal:
    """Deal the examples of one global batch, which is what is learned in an optimizer step, to ranks.

    All ranks make the same number of passes, as few as the budget allows, and the costliest rank has as little to do
    as can be. The result is a function of the arguments: every process computes the same, without communication.

    One result serves whatever makes ranks wait for each other. Under DDP with ``no_sync`` they wait at the end of a
    step, so that the costliest rank counts: examples go, costliest first, to the rank with the lowest cost so far, and
    then the costliest rank exchanges some of its own until it is within a thousandth of the mean, or cannot be cheaper.
    Under FSDP and ZeRO-3 they wait in every pass, so that the costliest of the k-th passes count: each rank fills its
    passes in the same way, longest first into the fullest pass with space. That neither changes what a rank computes
    in all, nor its number of passes.

    A rank that was dealt a batch cuts it into its passes with this function, too: ``deal(lengths[batch], 1,
    max_tokens, passes=number)`` makes the passes that were planned for it.

    Args:
        lengths: Tokens of each example, ``[examples]``. Those without tokens are in no pass; ``Deal.empty`` lists them.
        ranks: Number of ranks, or of groups of ranks that compute the same rows.
        max_tokens: Maximum number of tokens in a pass.
        passes: Number of passes that each rank makes. Default: as few as possible.
        attention_cost: Cost of attention over a document of l tokens, per l**2, in units of the other costs of a token.
        too_long: Policy for examples longer than ``max_tokens``: ``"error"``, or ``"alone"``, which gives each one a
            pass of its own.

    Raises:
        PackingError: An example is longer than the budget and ``too_long="error"``, the examples need more passes than
            ``passes``, lengths are not integers from 0, or an option is invalid.
    """
    given, budget = as_lengths(lengths), check_budget(max_tokens)
    cost = check_attention_cost(attention_cost)
    _check_number("ranks", ranks)
    _check_number("passes", 1 if passes is None else passes)
    kept = np.flatnonzero(given)
    sizes, costs = capped(given, budget, too_long)[kept], example_costs(given[kept], cost)
    found = dealt(sizes, costs, ranks, budget, passes)
    if passes is not None and found.passes > passes:
        raise PackingError(
            f"passes={passes}: expected as many as hold the examples, but {ranks} ranks need {found.passes} passes of "
            f"at most {budget} tokens. Give more passes, or raise max_tokens. Cut a batch that was dealt in its own "
            "order, with the max_tokens and too_long of the deal."
        )
    number = found.passes
    of_passes = [kept[each] for each in _parted(found.order, found.pass_of, ranks * number)]
    return Deal(
        [of_passes[first : first + number] for first in range(0, ranks * number, number)],
        [kept[batch] for batch in _parted(found.order, found.pass_of // number, ranks)],
        np.bincount(found.pass_of, costs, ranks * number).astype(np.float64).reshape(ranks, number),
        max(1, -(-fewest(*np.unique(sizes, return_counts=True), budget) // ranks)),
        _least(costs, ranks),
        without_tokens(given),
    )


def _check_number(name: str, number: object) -> None:
    if not isinstance(number, (int, np.integer)) or isinstance(number, bool) or number < 1:
        raise PackingError(f"{name}: expected a positive number, found {number!r}.")


def check_attention_cost(attention_cost: object) -> float:
    if isinstance(attention_cost, (int, float)) and math.isfinite(attention_cost) and attention_cost >= 0:
        return float(attention_cost)
    raise PackingError(f"attention_cost: expected a number from 0 (tokens only), found {attention_cost!r}.")


@dataclass(frozen=True)
class Dealt:
    pass_of: Ints  # ``rank * passes + k`` for each example
    passes: int  # of each rank
    order: Ints  # of the examples in a rank's batch


def dealt(sizes: Ints, costs: Floats, ranks: int, max_tokens: int, passes: int | None = None) -> Dealt:
    # _greedily is tried first, with the fewest passes that hold all tokens. It may not fill passes to the last token.
    # Then there are as many as the rows of fewest_rows need, if need be with these rows. More than ``passes`` are
    # returned if those are not enough.
    by_cost = np.argsort(-costs, kind="stable")  # sizes are in descending order, too
    number = max(1, -(-int(sizes.sum()) // (ranks * max_tokens))) if passes is None else passes
    pass_of = _greedily(by_cost, sizes, costs, ranks, number, max_tokens)
    if pass_of is None and ranks == 1 and passes is not None:  # what was dealt as rows is in the order of its passes
        in_turn = in_order(sizes.astype(np.int32), max_tokens).astype(np.int64)
        pass_of = in_turn if in_turn[-1] < passes else None
    if pass_of is None:
        rows = fewest_rows(sizes.astype(np.int32), max_tokens)
        needed = -(-(int(rows.max()) + 1) // ranks)
        if needed > number:
            pass_of = _greedily(by_cost, sizes, costs, ranks, needed, max_tokens)
        number = max(needed, number)
        if pass_of is None:
            every = _settled(rows.astype(np.int64), by_cost, costs, 1, ranks * number)
            return _by_rows(every, sizes, costs, ranks, number, max_tokens)
    pass_of = _levelled(pass_of, sizes, costs, ranks, number, max_tokens)
    return Dealt(_settled(pass_of, by_cost, costs, ranks, number), number, np.arange(len(sizes)))


def _greedily(by_cost: Ints, sizes: Ints, costs: Floats, ranks: int, passes: int, max_tokens: int) -> Ints | None:
    # The longest example comes first. It goes to the rank with the lowest cost so far that has space for it, and there
    # into the fullest pass that has space. The passes of a rank depend on its own examples alone, so that the rank
    # makes the same passes of them without the other ranks.
    spaces = [[(max_tokens, each) for each in range(passes)] for _ in range(ranks)]  # in ascending order
    cheapest = [(0.0, rank) for rank in range(ranks)]
    full: list[tuple[int, float, int]] = []  # ranks without space for this size, the one with the most space first
    pass_of = []
    for size, cost in zip(sizes[by_cost].tolist(), costs[by_cost].tolist()):
        while full and -full[0][0] >= size:
            heappush(cheapest, heappop(full)[1:])
        while cheapest and spaces[cheapest[0][1]][-1][0] < size:
            load, rank = heappop(cheapest)
            heappush(full, (-spaces[rank][-1][0], load, rank))
        if not cheapest:
            return None
        load, rank = cheapest[0]
        space, number = spaces[rank].pop(bisect_left(spaces[rank], (size,)))
        insort(spaces[rank], (space - size, number))
        heapreplace(cheapest, (load + cost, rank))
        pass_of.append(rank * passes + number)
    found = np.empty(len(sizes), np.int64)
    found[by_cost] = pass_of
    return found


def _levelled(pass_of: Ints, sizes: Ints, costs: Floats, ranks: int, passes: int, max_tokens: int) -> Ints:
    """Exchange examples between the costliest and the cheapest rank until the costliest is near the mean."""
    # Ranks of a few examples differ by some percent without this.
    loads = np.bincount(pass_of // passes, costs, ranks)
    mean, batches = loads.mean(), None
    for _ in range(2 * ranks):
        high, low = int(loads.argmax()), int(loads.argmin())
        if (loads[high] - mean) * ENOUGH <= mean:
            break
        batches = batches or _parted(np.arange(len(sizes)), pass_of // passes, ranks)
        more, less, excess = batches[high], batches[low], loads[high] - loads[low]
        # An example goes to the cheapest rank, and none or one comes back, such that both cost nearly the same.
        saved = costs[more][:, None] - np.append(costs[less], 0)
        away, back = divmod(int(np.abs(saved - excess / 2).argmin()), len(less) + 1)
        if not 0 < saved[away, back] < excess:
            break
        taken = slice(back, back + 1)  # it is empty if no example comes back
        more, less = np.append(np.delete(more, away), less[taken]), np.append(np.delete(less, taken), more[away])
        changed = np.sort(more), np.sort(less)
        cuts = [cut for batch in changed if (cut := _cut(sizes[batch], costs[batch], passes, max_tokens)) is not None]
        if len(cuts) < 2:
            break
        for rank, batch, cut in zip((high, low), changed, cuts):
            batches[rank], loads[rank], pass_of[batch] = batch, costs[batch].sum(), cut + rank * passes
    return pass_of


def _cut(sizes: Ints, costs: Floats, passes: int, max_tokens: int) -> Ints | None:
    if passes == 1:
        return np.zeros(len(sizes), np.int64) if int(sizes.sum()) <= max_tokens else None
    return _greedily(np.argsort(-costs, kind="stable"), sizes, costs, 1, passes, max_tokens)


def _settled(pass_of: Ints, by_cost: Ints, costs: Floats, ranks: int, passes: int) -> Ints:
    """Give every pass an example where a rank has enough of them, and number a rank's passes, costliest first."""
    if passes == 1:
        return pass_of
    counts = np.bincount(pass_of, minlength=ranks * passes).reshape(ranks, passes)
    for rank, empty in np.argwhere(counts == 0).tolist():
        # A pass without an example gets the shortest one of the rank's pass that holds the most.
        most = int(counts[rank].argmax())
        if counts[rank, most] > 1:
            last = by_cost[np.flatnonzero(pass_of[by_cost] == rank * passes + most)[-1]]
            pass_of[last] = rank * passes + empty
            counts[rank, [most, empty]] += (-1, 1)
    of_passes = np.bincount(pass_of, costs, ranks * passes).reshape(ranks, passes)
    place = np.argsort(np.argsort(-of_passes, axis=1, kind="stable"), axis=1)
    return place.ravel()[pass_of] + pass_of // passes * passes


def _by_rows(rows: Ints, sizes: Ints, costs: Floats, ranks: int, passes: int, max_tokens: int) -> Dealt:
    # Rows come costliest first. Neighbours are the k-th passes of the ranks, and the costliest of them goes to the rank
    # with the least so far.
    of_rows = np.bincount(rows, costs, ranks * passes).reshape(passes, ranks)
    load, new = np.zeros(ranks), np.empty((passes, ranks), np.int64)
    for number, alike in enumerate(of_rows):
        cheapest = np.argsort(load, kind="stable")
        new[number] = cheapest * passes + number
        load[cheapest] += alike
    pass_of = new.ravel()[rows]
    order = np.argsort(pass_of, kind="stable")
    # A rank may not find these rows again in its batch, so it cuts the batch in order, in which they follow each other.
    for rank, batch in enumerate(_parted(order, pass_of // passes, ranks)):
        pass_of[batch] = dealt(sizes[batch], costs[batch], 1, max_tokens, passes).pass_of + rank * passes
    return Dealt(pass_of, passes, order)


def _parted(order: Ints, part_of: Ints, parts: int) -> list[Ints]:
    of_parts = order[np.argsort(part_of[order], kind="stable")]
    return np.split(of_parts, np.cumsum(np.bincount(part_of, minlength=parts))[:-1])


def _least(costs: Floats, ranks: int) -> float:
    # Some rank costs at least the mean. Of the j * ranks + 1 costliest examples, some rank has j + 1, which cost at
    # least as much as the j + 1 cheapest of them.
    until = np.append(0, np.cumsum(np.sort(costs)[::-1]))
    upto = np.arange(1, len(until), ranks)
    return float(max(until[-1] / ranks, (until[upto] - until[upto - 1 - np.arange(len(upto))]).max(initial=0)))
