"""Strategies that assign a row to each example, from lengths int32 ``[n]`` to row numbers int32 ``[n]``."""

from __future__ import annotations

from array import array
from functools import partial
from heapq import heappop, heappush
from typing import Callable

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Ints32 = npt.NDArray[np.int32]  # half of int64's memory, and half of the time spent on memory
Strategy = Callable[[Ints32, int], Ints32]


ENOUGH = 1000  # rows of best fit are taken if at most one in so many is above the bound of ``fewest``

# The share of the budget that _like_sums leaves free on average, so that few rows are above the budget.
SPARE = 1 / 1000


def fewest_rows(lengths: Ints32, max_tokens: int) -> Ints32:
    # Best fit puts the longest examples together, and then the shortest. If a row holds a few examples of nearly one
    # length, most rows waste nearly as much as one of them. Rows of long and short ones waste next to nothing there.
    return _longest_first(lengths, max_tokens, _fewest_rows)


def best_fit_decreasing(lengths: Ints32, max_tokens: int) -> Ints32:
    return _longest_first(lengths, max_tokens, _best_fit)


def first_fit_decreasing(lengths: Ints32, max_tokens: int) -> Ints32:
    return _longest_first(lengths, max_tokens, partial(_best_fit, first_fit=True))


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


def by_length(lengths: Ints32, max_tokens: int) -> Ints32:
    return _longest_first(lengths, max_tokens, in_order)


def mini_batches(lengths: Ints32, batch_size: int) -> Ints32:
    return np.arange(len(lengths), dtype=np.int32) // batch_size


STRATEGIES: dict[str, Strategy] = {
    "fewest_rows": fewest_rows,
    "best_fit_decreasing": best_fit_decreasing,
    "first_fit_decreasing": first_fit_decreasing,
    "in_order": in_order,
    "sorted": by_length,
}


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
