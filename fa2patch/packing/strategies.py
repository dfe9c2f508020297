"""Which examples share a row, and which rank gets it: best fit, for all that plans, streams, samples and cuts passes.

A strategy goes from lengths int32 ``[n]`` to row numbers int32 ``[n]``.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush, heapreplace
from typing import Any, Callable

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Ints32 = npt.NDArray[np.int32]  # half of int64's memory, and half of the time spent on memory
Strategy = Callable[[Ints32, int], Ints32]


ENOUGH = 1000  # rows of best fit are taken if at most one in so many is above the bound of ``fewest``

# The share of the budget that _like_sums leaves free on average, so that few rows are above the budget.
SPARE = 1 / 1000


def fewest_rows(lengths: Ints32, max_tokens: int) -> Ints32:
    # Best fit puts the longest examples together, and then the shortest. If a row holds a few examples of nearly one
    # length, most rows waste nearly as much as one of them. Rows of long and short ones waste next to nothing there.
    return _longest_first(lengths, max_tokens, _fewest_rows)


def in_order(lengths: Ints32, max_tokens: int) -> Ints32:
    # This is next fit: a row begins where the next example does not fit.
    ends = np.cumsum(lengths, dtype=np.int64)
    after = array("q", np.searchsorted(ends, ends - lengths + max_tokens, side="right").tobytes())
    starts, start = array("i"), 0
    while start < len(after):
        starts.append(start)
        start = after[start]
    counts = np.diff(np.array(starts), append=np.int32(len(after)))
    return np.repeat(np.arange(len(counts), dtype=np.int32), counts)


def mini_batches(lengths: Ints32, batch_size: int) -> Ints32:
    return np.arange(len(lengths), dtype=np.int32) // batch_size


def by_key(keys: Ints32, descending: bool = False) -> Ints32:
    """The stable argsort of non-negative keys."""
    # NumPy sorts 16-bit numbers by radix, in linear time: keys are sorted by their lower half, then by their upper one.
    if descending:
        keys = keys.max(initial=0) - keys
    order = np.argsort(keys.astype(np.uint16), kind="stable").astype(np.int32)  # astype keeps the lower half
    if keys.max(initial=0) < 2**16:
        return order
    return order[np.argsort((keys >> 16).astype(np.uint16)[order], kind="stable")]


def fewest(
    sizes: Ints,  # distinct lengths, in ascending order
    counts: Ints,  # of the examples of each length
    max_tokens: int,
) -> int:
    """A lower bound on the rows of any plan: tokens / max_tokens, or more where examples cannot fill the rows."""
    # The second bound gives an example of x tokens a price: 1 / (k+1) + slope * (x - C / (k+1)), at most 1 / k and at
    # least 0, for a budget of C, a whole k and a slope of at least 1 / C. No row costs more than 1, so there are at
    # least as many rows as all examples cost.
    if not len(sizes):
        return 0
    # This is why: k examples cost at most k / k, and m > k examples with a price and at most C tokens cost at most
    # m / (k+1) + slope * (C - m * C / (k+1)) <= m / (k+1) + 1 - m / (k+1) = 1, because the bracket is not positive.
    ends, tokens = np.append(0, np.cumsum(counts)), np.append(0, np.cumsum(counts * sizes))
    # Every length X is tried, with the k for which C / (k+1) < X <= C / k, and the slope for which X costs just 1 / k.
    k, upto = max_tokens // sizes, np.arange(1, len(sizes) + 1)
    # all is multiplied by k * (k + 1) * over, and so is whole: rounding must not raise the bound
    over = (k + 1) * sizes - max_tokens
    free = np.minimum(np.searchsorted(sizes, (max_tokens - k * over) // (k + 1), side="right"), upto)
    cost = (ends[upto] - ends[free]) * (k * over - max_tokens) + (tokens[upto] - tokens[free]) * (k + 1)
    cost += (ends[-1] - ends[upto]) * (k + 1) * over
    return -min(-int(tokens[-1]) // max_tokens, int((-cost // (k * (k + 1) * over)).min()))


def _longest_first(lengths: Ints32, max_tokens: int, fill: Strategy) -> Ints32:
    # The rows are returned in the order of the examples.
    order = by_key(lengths, descending=True)
    row_of = lengths[order]
    row_of[order] = fill(row_of, max_tokens)
    return row_of


def _fewest_rows(by_size: Ints32, max_tokens: int) -> Ints32:
    row_of = _best_fit(by_size, max_tokens)
    starts, counts = _of_equals(by_size)
    needed = int(row_of.max(initial=-1)) + 1
    bound = fewest(by_size[starts[::-1]].astype(np.int64), counts[::-1], max_tokens)
    if (needed - bound) * ENOUGH <= needed:
        return row_of
    other = _like_sums(by_size, max_tokens)
    left = np.flatnonzero(other < 0)
    again = _fewest_rows if 4 * len(left) <= 3 * len(other) else _best_fit  # all tries take four times as long as one
    other[left] = again(by_size[left], max_tokens) + (other.max() + 1)
    return other if other.max() + 1 < needed else row_of


def _like_sums(by_size: Ints32, max_tokens: int) -> Ints32:
    """Make rows of k and of k + 1 examples, so many as a row holds on average, with sums just below the budget."""
    row_of, rows, count = np.full_like(by_size, -1), 0, len(by_size)
    until, room = np.append(0, np.cumsum(by_size, dtype=np.int64)), max_tokens / (1 + SPARE)
    needed = int(until[-1] / room) + 1
    k = count // needed
    # so many rows of k + 1 are needed; fewer if the shortest examples are too long for them
    tried = np.arange(min(count - k * needed, count // (k + 1)) + 1)
    more = int(np.flatnonzero(until[-1] - until[count - (k + 1) * tried] <= tried * room)[-1])
    long = _with_mean(until, (count - (k + 1) * more) // max(k, 1) * k, room / max(k, 1))
    short = np.delete(np.arange(count, dtype=np.int32), long)
    for examples, each in ((long, k), (short[len(short) - (k + 1) * more :], k + 1)):
        if len(examples):
            row, sums = _evened(by_size[examples].reshape(each, -1))
            fits = sums <= max_tokens
            # Examples whose row would be above the budget have the row -1.
            number = np.where(fits, np.cumsum(fits) + (rows - 1), -1)
            row_of[examples] = number[row]
            rows += int(fits.sum())
    return row_of


def _with_mean(until: Ints, number: int, mean: float) -> Ints32:
    """Choose so many examples with about that mean length: the longest, and an even share of the others."""
    # ``until`` are the sums of the lengths in descending order. If the mean is too low for that, the longest are
    # chosen.
    count = len(until) - 1
    longest = np.linspace(0, number, 5000).astype(np.int64)
    sums = until[longest] + (number - longest) / np.maximum(count - longest, 1) * (until[-1] - until[longest])
    first = int(longest[max(np.searchsorted(sums, number * mean, side="right") - 1, 0)])
    others = first + (np.arange(number - first) + 0.5) * ((count - first) / max(number - first, 1))
    return np.append(np.arange(first, dtype=np.int32), others.astype(np.int32))


def _evened(blocks: Ints32) -> tuple[Ints32, Ints]:
    """Give every row one example of each block, so that the sums of the rows are alike."""
    # The blocks, int32 [examples in a row, rows], are in descending order. The block that differs most comes first. The
    # longest example of each block goes to the row with the least so far. The rows are returned row after row of
    # ``blocks``.
    row_of, sums = np.empty_like(blocks), np.zeros(blocks.shape[1], dtype=np.int64)
    for block in np.argsort(blocks[:, -1] - blocks[:, 0], kind="stable").tolist():
        row_of[block] = by_key(np.minimum(sums, 2**31 - 1).astype(np.int32))
        sums[row_of[block]] += blocks[block]
    return row_of.ravel(), sums


def _of_equals(by_size: Ints32) -> tuple[Ints, Ints]:
    # Returned is where each distinct length begins among sorted ones, and how many there are.
    starts = np.flatnonzero(np.diff(by_size, prepend=np.int32(0)))
    return starts, np.diff(starts, append=len(by_size))


def _best_fit(by_size: Ints32, max_tokens: int, first_fit: bool = False) -> Ints32:
    """Run a decreasing strategy on one distinct length at a time instead of one example at a time."""
    # Examples of one length fill runs of neighbouring rows with the same space. Every length splits at most one run,
    # and a run loses at least half of its space whenever it is used up. This takes O(lengths x log(max_tokens)) steps
    # for any number of examples.
    starts, counts = _of_equals(by_size)
    filled = _fill(by_size[starts].tolist(), counts.tolist(), max_tokens, first_fit)
    start, rows, each = filled.T
    first = np.repeat(start - (np.cumsum(rows, dtype=np.int32) - rows), rows)
    first += np.arange(len(first), dtype=np.int32)
    return np.repeat(first, np.repeat(each.astype(np.intp), rows))


def _fill(sizes: list[int], counts: list[int], max_tokens: int, first_fit: bool) -> Ints32:
    # The result is [fillings, 3]: (first row, number of rows, examples in each row), in the order of the examples.
    # Sizes are distinct lengths in descending order, with the number of examples of each.
    filled = array("i")
    # Both lists are heaps of runs: those with space for the current size, where the next one to use is first, and
    # the others, where the one with the most space is first.
    fits: list[tuple[int, int, int, int]] = []
    too_small: list[tuple[int, int, int]] = []
    rows = 0

    def keep(space: int, start: int, stop: int) -> None:
        if start < stop and space >= size:
            heappush(fits, (start if first_fit else space, start, stop, space))
        elif start < stop and space:
            heappush(too_small, (-space, start, stop))

    for size, left in zip(sizes, counts):
        while too_small and -too_small[0][0] >= size:
            space, start, stop = heappop(too_small)
            keep(-space, start, stop)
        while left:
            if fits:
                _, start, stop, space = heappop(fits)
            else:
                space, start = max_tokens, rows
                stop = rows = rows - -left // (max_tokens // size)
            each = space // size
            full = min(left // each, stop - start)
            if full:
                filled.extend((start, full, each))
                left -= full * each
                keep(space - each * size, start, start + full)
                start += full
            if left and start < stop:  # fewer than fit into one row
                filled.extend((start, 1, left))
                keep(space - left * size, start, start + 1)
                start, left = start + 1, 0
            keep(space, start, stop)
    return np.array(filled).reshape(-1, 3)


STRATEGIES: dict[str, Strategy] = {
    "fewest_rows": fewest_rows,
    "best_fit_decreasing": partial(_longest_first, fill=_best_fit),
    "first_fit_decreasing": partial(_longest_first, fill=partial(_best_fit, first_fit=True)),
    "in_order": in_order,
    "sorted": partial(_longest_first, fill=in_order),
}


# --- examples that arrive --------------------------------------------------------------------------------------------


class Waiting:
    """Examples of a stream that are in no row yet. The keys that name them go up in the order of arrival."""

    def __init__(self) -> None:
        self._by_arrival: dict[tuple[int, int], tuple[Any, int]] = {}  # (number of the example, start of the piece)
        self._by_length: list[tuple[int, int, int]] = []  # (tokens, *-key): of equal lengths, the oldest one is last

    def __len__(self) -> int:
        return len(self._by_length)

    @property
    def oldest(self) -> int:
        return next(iter(self._by_arrival), (sys.maxsize, 0))[0]

    def keys(self) -> list[tuple[int, int]]:
        return list(self._by_arrival)

    def add(self, key: tuple[int, int], example: Any, tokens: int) -> None:
        self._by_arrival[key] = example, tokens
        insort(self._by_length, (tokens, -key[0], -key[1]))

    def row(self, max_tokens: int) -> tuple[list[Any], int]:
        """A row of the oldest example and then, repeatedly, the longest one that fits; and its tokens."""
        oldest = next(iter(self._by_arrival))
        found, space = [], max_tokens
        place = bisect_left(self._by_length, (self._by_arrival[oldest][1], -oldest[0], -oldest[1]))
        while place >= 0:
            tokens, number, start = self._by_length.pop(place)
            found.append(self._by_arrival.pop((-number, -start))[0])
            space -= tokens
            place = bisect_right(self._by_length, (space, 1)) - 1
        return found, max_tokens - space

    def rest(self, max_tokens: int) -> list[tuple[list[Any], int]]:
        """The rows of all waiting examples, by their oldest example; and their tokens."""
        waiting = list(self._by_arrival.values())
        row_of = fewest_rows(np.array([tokens for _, tokens in waiting], np.int32), max_tokens)
        rows = parted(np.arange(len(waiting)), row_of)
        by_oldest = [[waiting[index] for index in row] for row in sorted(rows, key=lambda row: int(row[0]))]
        return [([example for example, _ in row], sum(tokens for _, tokens in row)) for row in by_oldest]


# --- examples to ranks, and rows to more rows ------------------------------------------------------------------------


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


def _greedily(
    by_cost: Ints, sizes: Ints, costs: Floats, ranks: int, passes: int, max_tokens: int, most: int | None = None
) -> Ints | None:
    # The costliest example comes first. It goes to the rank with the lowest cost so far that has space for it, and
    # there into the fullest pass that has space. The passes of a rank depend on its own examples alone, so that the
    # rank makes the same passes of them without the other ranks. No pass gets more than ``most`` examples.
    spaces = [[(max_tokens, each) for each in range(passes)] for _ in range(ranks)]  # in ascending order
    cheapest = [(0.0, rank) for rank in range(ranks)]
    full: list[tuple[int, float, int]] = []  # ranks without space for this size, the one with the most space first
    counts, pass_of = [0] * (ranks * passes), []
    for size, cost in zip(sizes[by_cost].tolist(), costs[by_cost].tolist()):
        while full and -full[0][0] >= size:
            heappush(cheapest, heappop(full)[1:])
        while cheapest and spaces[cheapest[0][1]][-1][0] < size:
            load, rank = heappop(cheapest)
            heappush(full, (-spaces[rank][-1][0], load, rank))
        if not cheapest:
            return None
        load, rank = cheapest[0]
        heapreplace(cheapest, (load + cost, rank))
        space, number = spaces[rank].pop(bisect_left(spaces[rank], (size,)))
        at = rank * passes + number
        counts[at] += 1
        insort(spaces[rank], (space - size if counts[at] != most else -1, number))  # nothing fits into a space of -1
        pass_of.append(at)
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
        batches = batches or parted(np.arange(len(sizes)), pass_of // passes, ranks)
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
    for rank, batch in enumerate(parted(order, pass_of // passes, ranks)):
        pass_of[batch] = dealt(sizes[batch], costs[batch], 1, max_tokens, passes).pass_of + rank * passes
    return Dealt(pass_of, passes, order)


def parted(order: Ints, part_of: Ints | Ints32, parts: int = 0) -> list[Ints]:
    of_parts = order[np.argsort(part_of[order], kind="stable")]
    return np.split(of_parts, np.cumsum(np.bincount(part_of, minlength=parts)))[:-1]


def of_few(sizes: Ints, max_tokens: int, most: int) -> list[Ints]:
    """Rows of at most so many examples, by best fit."""
    by_size = np.argsort(-sizes, kind="stable")
    row_of = _greedily(by_size, sizes, sizes.astype(np.float64), 1, len(sizes), max_tokens, most)
    assert row_of is not None, "there are as many rows as examples"
    return parted(by_size, row_of)


def divided(rows: Sequence[Ints], costs: Floats | Ints, number: int) -> list[Ints]:
    """Cut the costliest row of several examples in two, in its order, until there are so many; if there can be."""
    parts = list(rows)
    while len(parts) < number:
        divisible = [place for place, part in enumerate(parts) if len(part) > 1]
        if not divisible:
            break
        place = max(divisible, key=lambda at: float(costs[parts[at]].sum()))
        until = np.cumsum(costs[parts[place]])
        middle = int(np.abs(2 * until[:-1] - until[-1]).argmin()) + 1
        parts[place : place + 1] = np.split(parts[place], [middle])
    return parts
