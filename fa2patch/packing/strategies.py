"""Strategies that assign a row to each example, from lengths int32 ``[n]`` to row numbers int32 ``[n]``.

int32 takes half of int64's memory, and half of the time spent on memory.
"""

from __future__ import annotations

from array import array
from heapq import heappop, heappush
from typing import Callable

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Ints32 = npt.NDArray[np.int32]
Strategy = Callable[[Ints32, int], Ints32]


def best_fit_decreasing(lengths: Ints32, max_tokens: int) -> Ints32:
    """Put examples, longest first, each into the fullest row that has space for it."""
    return _decreasing(lengths, max_tokens, first_fit=False)


def first_fit_decreasing(lengths: Ints32, max_tokens: int) -> Ints32:
    """Put examples, longest first, each into the oldest row that has space for it."""
    return _decreasing(lengths, max_tokens, first_fit=True)


def in_order(lengths: Ints32, max_tokens: int) -> Ints32:
    """Put examples in their order into a row, and start a new row if the next one does not fit (next fit)."""
    ends = np.cumsum(lengths, dtype=np.int64)
    after = array("q", np.searchsorted(ends, ends - lengths + max_tokens, side="right").tobytes())
    starts, start = array("i"), 0
    while start < len(after):
        starts.append(start)
        start = after[start]
    counts = np.diff(np.array(starts), append=np.int32(len(after)))
    return np.repeat(np.arange(len(counts), dtype=np.int32), counts)


def by_length(lengths: Ints32, max_tokens: int) -> Ints32:
    """Apply :func:`in_order` to examples sorted longest first, so that the examples of a row have similar lengths."""
    order = by_key(lengths, descending=True)
    rows = np.empty_like(lengths)
    rows[order] = in_order(lengths[order], max_tokens)
    return rows


def mini_batches(lengths: Ints32, batch_size: int) -> Ints32:
    """Put ``batch_size`` examples of any length into each row, in their order."""
    return np.arange(len(lengths), dtype=np.int32) // batch_size


STRATEGIES: dict[str, Strategy] = {
    "best_fit_decreasing": best_fit_decreasing,
    "first_fit_decreasing": first_fit_decreasing,
    "in_order": in_order,
    "sorted": by_length,
}


def by_key(keys: Ints32, descending: bool = False) -> Ints32:
    """Return the stable argsort of non-negative keys.

    Key and index are sorted as one int64 number, which is the fastest way.
    """
    both = keys.astype(np.int64)
    if descending:
        np.subtract(2**31 - 1, both, out=both)
    both <<= 32
    both |= np.arange(len(keys), dtype=np.int32)
    both.sort()
    return both.astype(np.int32)  # the lower half is the index


def _decreasing(lengths: Ints32, max_tokens: int, first_fit: bool) -> Ints32:
    """Run a decreasing strategy on one distinct length at a time instead of one example at a time.

    Examples of one length fill runs of neighbouring rows with the same space. Every length splits at most one run, and
    a run loses at least half of its space whenever it is used up. This takes O(lengths x log(max_tokens)) steps for
    any number of examples.
    """
    order = by_key(lengths, descending=True)
    by_size = lengths[order]
    starts = np.flatnonzero(np.diff(by_size, prepend=np.int32(0)))
    counts = np.diff(starts, append=len(by_size))
    filled = _fill(by_size[starts].tolist(), counts.tolist(), max_tokens, first_fit)
    start, rows, each = filled.T
    first = np.repeat(start - (np.cumsum(rows, dtype=np.int32) - rows), rows)
    first += np.arange(len(first), dtype=np.int32)
    row_of = by_size  # its memory serves again
    row_of[order] = np.repeat(first, np.repeat(each.astype(np.intp), rows))
    return row_of


def _fill(sizes: list[int], counts: list[int], max_tokens: int, first_fit: bool) -> Ints32:
    """Return ``[fillings, 3]``: (first row, number of rows, examples in each row), in the order of the examples.

    Args:
        sizes: Distinct lengths, in descending order.
        counts: Number of examples of each length.
    """
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
