"""The documents of a row, and what pieces of them cost the part that holds them: attention, and keys that it lacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

MOST = 1.08  # the attention of a part, in means, up to which pieces are dealt and swapped


class Piece(NamedTuple):
    document: int
    start: int
    end: int

    @property
    def tokens(self) -> int:
        return self.end - self.start


class RowCosts:
    # The documents of a row: the attention of their pieces, and the keys that these lack.

    def __init__(self, lengths: Sequence[int], window: int | None) -> None:
        self.lengths = lengths
        self.window = window if window is not None and window < max(lengths) else None
        self.tokens, self.work = sum(lengths), sum(map(self.until, lengths))

    def until(self, tokens: int) -> int:
        # of a document's first tokens; of several at once, if they are an array
        seen = tokens * (tokens + 1) // 2
        if self.window is None:
            return seen
        over = tokens - self.window
        return seen - (over > 0) * (over * (over + 1) // 2)

    def between(self, start: int, end: int) -> int:
        if self.window is None:
            return (end * (end + 1) - start * (start + 1)) // 2
        return self.until(end) - self.until(start)

    def of(self, piece: Piece) -> int:
        return self.between(piece.start, piece.end)

    def longest(self, start: int, end: int, held: int, work: float) -> int:
        # of ``held`` tokens at both ends of start..end, so many at the end are not too much work
        def too_much(last: int) -> bool:
            return self.between(end - last, end) + self.between(start, start + held - last) > work

        return first_that(1, held + 1, too_much) - 1

    def received(self, pieces: Sequence[Piece]) -> int:
        # A document's second piece has what the first one received.
        cut = {document for document, start, _ in pieces if start}
        count, before = 0, Piece(-1, 0, 0)
        for piece in sorted(piece for piece in pieces if piece.document in cut):
            has = before.end if piece.document == before.document else 0
            count += piece.start - max(has, 0 if self.window is None else piece.start - self.window + 1)
            before = piece
        return count


def first_that(low: int, high: int, holds: Callable[[int], bool]) -> int:
    # The least number from low on for which it holds, which then does for all above it; high if there is none before.
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
