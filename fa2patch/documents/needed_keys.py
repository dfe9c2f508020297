"""Which keys the parts of split rows lack: those of the documents that are cut, and no others.

Queries stay in their part. A piece of a document (:class:`.parts.Pieces`) sees its document's keys up to its own end,
or all of them if attention is not causal, and of these only those in its window. Everything here is computed from
lengths on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .parts import Pieces

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Sent(NamedTuple):
    """Runs of tokens whose keys one part sends to another, sorted by receiver, sender and token: int64 ``[runs]``."""

    receivers: NDArray[Any]
    senders: NDArray[Any]
    starts: NDArray[Any]
    ends: NDArray[Any]
    places: NDArray[Any]  # where each run starts among its sender's tokens


class Seen(NamedTuple):
    """The tokens whose keys the pieces see: int64 ``[pieces]``."""

    starts: NDArray[Any]
    ends: NDArray[Any]


def seen_by(pieces: Pieces, causal: bool, window: int | None) -> Seen:
    # A window that looks both ways is not asked for: kernels count it from the last key.
    assert causal or window is None
    if window is None:
        starts = pieces.first
    else:
        starts = np.maximum(pieces.first, pieces.starts - window + 1)
    return Seen(starts, pieces.ends if causal else pieces.last)


def sent(pieces: Pieces, seen: Seen) -> Sent:
    found: list[NDArray[Any]] = []
    counts = np.bincount(pieces.documents)
    for document in np.flatnonzero(counts > 1):
        own = slice(*np.searchsorted(pieces.documents, [document, document + 1]))
        found.append(_sent_of_one(pieces, seen, np.arange(own.start, own.stop)))
    runs = np.concatenate(found, 1) if found else np.empty((5, 0), np.int64)
    return Sent(*runs[:, np.lexsort((runs[2], runs[1], runs[0]))])


def _sent_of_one(pieces: Pieces, seen: Seen, own: NDArray[Any]) -> NDArray[Any]:
    # [5, runs]. What several pieces of a part lack of the same piece is sent once.
    starts = np.maximum(seen.starts[own][:, None], pieces.starts[own])  # [receiving pieces, sending pieces]
    ends = np.minimum(seen.ends[own][:, None], pieces.ends[own])
    lacks, has = np.nonzero((starts < ends) & (pieces.parts[own][:, None] != pieces.parts[own]))
    starts, ends, receivers = starts[lacks, has], ends[lacks, has], pieces.parts[own][lacks]
    sorting = np.lexsort((starts, has, receivers))
    starts, ends, receivers, has = starts[sorting], ends[sorting], receivers[sorting], own[has[sorting]]
    # a new run starts where the receiver or the piece is another one, or behind all that this piece has sent so far
    kind = receivers * len(pieces.starts) + has
    reach = kind * (pieces.ends[-1] + 1)
    before = np.maximum.accumulate(ends + reach)
    new = np.append(True, starts[1:] + reach[1:] > before[:-1])[: len(starts)]
    at = np.flatnonzero(new)
    ends = np.maximum.reduceat(ends + reach, at) - reach[at] if len(at) else ends
    starts, receivers, has = starts[at], receivers[at], has[at]
    places = pieces.places[has] + starts - pieces.starts[has]
    return np.stack([receivers, pieces.parts[has], starts, ends, places])


@dataclass(frozen=True)
class Exchange:
    """What one part sends and receives, and which keys its pieces see."""

    sends: NDArray[Any]  # int64: its own tokens that it sends, by their places, to the first part, then to the second
    sizes: tuple[list[int], list[int]]  # how many tokens it sends to each part, and receives from each
    lengths: tuple[int, ...]  # of its pieces' queries
    key_lengths: tuple[int, ...]  # of its pieces' keys
    keys: NDArray[Any]  # int64 [keys]: all pieces' keys, among its own tokens and then those received
    any_sent: bool  # whether any part sends something


def exchange_of(pieces: Pieces, number: int, parts: int, causal: bool, window: int | None) -> Exchange:
    """What the part of this ``number`` does, where there are so many ``parts``."""
    seen = seen_by(pieces, causal, window)
    runs = sent(pieces, seen)
    lengths = runs.ends - runs.starts
    to, by = runs.senders == number, runs.receivers == number
    own = pieces.of_part(number)
    count = int(pieces.lengths[own].sum())
    # what it holds: its own pieces, and what it receives behind them
    starts = np.concatenate([pieces.starts[own], runs.starts[by]])
    places = np.concatenate([pieces.places[own], count + _ends_before(lengths[by])])
    sorting = np.argsort(starts)
    starts, places = starts[sorting], places[sorting]
    tokens = all_between(seen.starts[own], seen.ends[own])
    held = np.searchsorted(starts, tokens, side="right") - 1
    return Exchange(
        all_between(runs.places[to], runs.places[to] + lengths[to]),
        (_counts(runs.receivers[to], lengths[to], parts), _counts(runs.senders[by], lengths[by], parts)),
        tuple(pieces.lengths[own].tolist()),
        tuple((seen.ends[own] - seen.starts[own]).tolist()),
        places[held] + tokens - starts[held],
        len(lengths) > 0,
    )


def _counts(of: NDArray[Any], lengths: NDArray[Any], parts: int) -> list[int]:
    counts: list[int] = np.bincount(of, lengths, parts).astype(np.int64).tolist()
    return counts


def _ends_before(lengths: NDArray[Any]) -> NDArray[Any]:
    ends: NDArray[Any] = np.cumsum(lengths) - lengths
    return ends


def all_between(starts: NDArray[Any], ends: NDArray[Any]) -> NDArray[Any]:
    # start, ..., end - 1 of each, end to end
    lengths = ends - starts
    tokens: NDArray[Any] = np.repeat(starts - _ends_before(lengths), lengths) + np.arange(lengths.sum())
    return tokens
