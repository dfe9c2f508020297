"""Swaps pieces of documents between parts that hold too much attention, or lack too many keys, and others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from ..documents.needed_keys import all_between
from ..documents.parts import Order
from .part_dealer import Part
from .part_pieces import MOST, Piece, RowCosts

# How many pieces are looked at for a swap. This takes a third of a second at most, and a hundredth in most rows.
LOOKS = 30_000

HEAVIEST = 8  # pieces of a part with too much attention are looked at for a swap


class _Swap(NamedTuple):
    # what becomes of a part and of the one that it swaps with: pieces, work and tokens received
    ours: tuple[list[Piece], int, int]
    theirs: tuple[list[Piece], int, int]


class Swapper:
    # Pieces change places with as many tokens of other parts.

    def __init__(self, row: RowCosts, sizes: Sequence[int], parts: Iterable[Part]) -> None:
        self.row, self.sizes, self.looks = row, tuple(sizes), LOOKS
        self.most = [MOST * row.work * size / row.tokens for size in sizes]
        self.parts = [(joined(part.pieces), part.done, row.received(part.pieces)) for part in parts]

    @property
    def received(self) -> int:
        return max(received for _, _, received in self.parts)

    @property
    def busiest(self) -> float:
        return max(work for _, work, _ in self.parts) * len(self.parts) / self.row.work

    def order(self) -> Order:
        documents, starts, ends = np.array([*zip(*(piece for part, _, _ in self.parts for piece in part))])
        first = np.cumsum([0, *self.row.lengths])[documents]
        return Order(all_between(first + starts, first + ends), self.sizes)

    def swap(self, limit: int) -> None:
        # at most as often as there are parts, and as long as the worst part gets better
        for _ in self.parts:
            worst = max(range(len(self.parts)), key=lambda part: self.ill(part, self.parts[part], limit))
            now, best, cost = self.ill(worst, self.parts[worst], limit), None, (np.inf, 0)
            if now <= 1:
                return
            for other, swap in self.swaps(worst, limit):
                ill = max(1, self.ill(worst, swap.ours, limit))
                if ill < now and (ill, len(swap.ours[0]) + len(swap.theirs[0])) < cost:
                    best, cost = (other, swap), (ill, len(swap.ours[0]) + len(swap.theirs[0]))
                    if ill == 1:
                        break
            if best is None:
                return
            other, swap = best
            self.parts[worst], self.parts[other] = swap.ours, swap.theirs

    def ill(self, number: int, part: tuple[list[Piece], int, int], limit: int) -> float:
        # above 1 if it has too much work, or receives too much
        _, work, received = part
        return max(work / self.most[number] if self.most[number] else 0, received / limit)

    def swaps(self, worst: int, limit: int) -> Iterator[tuple[int, _Swap]]:
        # What cannot help is left out: a piece that is alone of its document lacks all that is before it.
        ours, work, _ = self.parts[worst]
        heavy = work > self.most[worst]
        here = {piece.document for piece in ours}
        pieces = sorted(ours, key=lambda piece: piece.start + piece.end)[-HEAVIEST:]
        others = sorted(range(len(self.parts)), key=lambda part: self.parts[part][2])
        for piece, other in product(pieces if heavy else [piece for piece in ours if piece.start], others):
            theirs, _, received = self.parts[other]
            self.looks -= len(theirs)
            if other == worst or self.looks < 0:
                continue
            spare = limit - received
            if all(piece.document != each.document for each in theirs):
                spare -= self.row.received([piece])
            for where in theirs:
                if where.tokens < piece.tokens or spare < (-where.start if where.tokens == piece.tokens else 0):
                    continue
                for start in sorted({where.start, where.end - piece.tokens}):
                    if heavy or start < piece.start or where.document in here:
                        taken = Piece(where.document, start, start + piece.tokens)
                        self.looks -= len(theirs) + len(ours)
                        swap = self.swapped(worst, piece, other, where, taken)
                        if swap and swap.theirs[2] <= limit:
                            yield other, swap

    def swapped(self, worst: int, piece: Piece, other: int, where: Piece, taken: Piece) -> _Swap | None:
        # None if the other part would have too much work, or this one more than it has
        (ours, work, _), (theirs, other_work, _) = self.parts[worst], self.parts[other]
        more = self.row.of(piece) - self.row.of(taken)
        if other_work + more > self.most[other] or work - more > max(self.most[worst], work - 1):
            return None
        left = Piece(where.document, where.start, taken.start), Piece(where.document, taken.end, where.end)
        theirs = joined([*(each for each in theirs if each != where), *left, piece])
        ours = joined([*(each for each in ours if each != piece), taken])
        return _Swap(
            (ours, work - more, self.row.received(ours)), (theirs, other_work + more, self.row.received(theirs))
        )


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    # in the order of the row, and without those that have no tokens
    found: list[Piece] = []
    for piece in sorted(pieces):
        if found and found[-1].document == piece.document and found[-1].end == piece.start:
            found[-1] = Piece(piece.document, found[-1].start, piece.end)
        elif piece.tokens:
            found.append(piece)
    return found
