"""Which tokens of a packed row each process holds, so that all have as many tokens and as much attention to compute.

An engine that cuts rows into consecutive parts gives the end of a long document to one process, which then computes
several times the mean. Here the parts are dealt one after the other (:mod:`.part_dealer`). Then pieces are swapped
where a part would receive many keys (:mod:`.part_swapper`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..documents.needed_keys import seen_by, sent
from ..documents.parts import Order, Pieces, consecutive
from ..errors import PackingError
from .budget import as_lengths, positive
from .part_dealer import Dealer, Part
from .part_pieces import RowCosts
from .part_swapper import Swapper

if TYPE_CHECKING:
    from numpy.typing import NDArray

# The busiest part's attention, in means. The aim is a tenth above the mean: consecutive parts within it stay. Parts are
# usually dealt up to less, because the last ones have to take what is left.
AIM, USUAL = 1.1, 1.05

# No part is to receive more than consecutive parts do. Documents are dealt with a limit of this share of it. It holds
# where few are cut. Where most are, parts go beyond it, and pieces are swapped until none is above the last share. The
# second limit is for rows that are not dealt within the aim otherwise.
LIMITS = (0.7, 1.2), 0.95
# With a window every piece lacks nearly as many keys, and a part of equal work has two, one of them light.
WINDOWED = (2, 3), 2


class Measured(NamedTuple):
    """What an order costs each part, int64 ``[parts]``."""

    received: NDArray[Any]  # tokens whose keys and values it receives in each layer
    work: NDArray[Any]  # keys that its queries see, added up


def measured(lengths: Sequence[int], order: Order, window: int | None = None) -> Measured:
    parts = len(order.sizes)
    if not order.length:
        return Measured(np.zeros(parts, np.int64), np.zeros(parts, np.int64))
    pieces = Pieces.of(lengths, order)
    runs = sent(pieces, seen_by(pieces, True, window))
    starts: Any = pieces.starts - pieces.first
    work = RowCosts(lengths, window).between(starts, starts + pieces.lengths)
    received = np.bincount(runs.receivers, runs.ends - runs.starts, parts)
    return Measured(received.astype(np.int64), np.bincount(pieces.parts, work, parts).astype(np.int64))


def balanced(lengths: Sequence[int] | NDArray[Any], parts: int, window: int | None = None) -> Order:
    """Cut a packed row into parts that hold as many tokens as consecutive ones, with nearly equal attention in each.

    The result is a function of the arguments: every process computes the same, without communication. Consecutive
    parts stay if the busiest has at most a tenth more attention than the mean. Otherwise the most keys that a part
    receives are hardly ever more than with consecutive parts, unless these happen to cut every long document near its
    start. With a window they are some windows more.

    Args:
        lengths: Tokens of each document, in the order of the row. A document may have none.
        parts: Number of parts, one for each process.
        window: Tokens of a sliding window, within which ``query - key < window``. None: the whole document is seen.

    Returns:
        The tokens of each part, in the order of the row.

    Raises:
        PackingError: ``lengths`` are not integers from 0, they are too many tokens for a row, or ``parts`` or
            ``window`` is not positive.
    """
    given = as_lengths(lengths).tolist()
    positive("parts", parts)
    if window is not None:
        positive("window", window, "number of tokens")
    if sum(given) >= 2**31:
        raise PackingError(f"lengths: expected fewer than 2**31 tokens in a row, found {sum(given)}.")
    plain = consecutive(sum(given), parts)
    received, work = measured(given, plain, window)
    if work.max() * parts <= AIM * work.sum():
        return plain
    row, best = RowCosts(given, window), None
    limits, last = LIMITS if row.window is None else WINDOWED
    for limit in limits:
        dealt = _dealt(row, plain.sizes, int(limit * received.max()), int(last * received.max()))
        if best is None or dealt.busiest < best.busiest:
            best = dealt
        if best.busiest <= AIM:
            break
    assert best is not None
    return best.order()


def _dealt(row: RowCosts, sizes: Sequence[int], limit: int, swapped: int) -> Swapper:
    dealer, parts, tokens, work = Dealer(row, limit), [], 0, 0
    for size in sizes:
        mean = row.work * size / row.tokens
        late = row.work * (tokens + size) / row.tokens - work
        left = (row.work - work) * size / max(row.tokens - tokens, 1)
        part = Part(size, min(max(late, left), USUAL * mean), mean)
        dealer.deal(part)
        parts.append(part)
        tokens, work = tokens + size, work + part.done
    swapper = Swapper(row, sizes, parts)
    swapped = max(swapped, dealer.limit, 1)
    swapper.swap(max(swapped, swapper.received))  # where the work is too much
    swapper.swap(swapped)
    return swapper
