"""Deals a row's documents to parts, one part after the other.

A part gets the longest document, then shorter ones until it has its tokens and its attention. A document with more
attention than a part may have is cut. The part gets its end, and the next part what is left of it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from itertools import accumulate

from .part_pieces import MOST, Piece, RowCosts, first_that

NEAR = 0.02  # of the mean: a part of whole documents is near enough, and nothing is cut for less

# How far a look ahead goes: short documents that fill so many parts, so many limits, and at least so much of a document
# in each part; and the longer documents that are looked at to fill a part up. More hardly changes anything.
FILLED, STEPS, SLOWEST, OTHERS = 12, 400, 50, 50


class Part:
    # A part that is dealt. ``tokens`` and ``work`` are what it lacks.

    def __init__(self, size: int, all_work: float, mean: float) -> None:
        self.size = self.tokens = size
        self.all_work, self.done, self.mean = all_work, 0, mean
        self.pieces: list[Piece] = []

    @property
    def work(self) -> float:
        return self.all_work - self.done


class _Lights:
    # Pieces that fill a part up, the lightest first, and of the last one only its beginning.

    def __init__(self, row: RowCosts, pieces: list[Piece]) -> None:
        self.row, self.pieces = row, pieces
        self.ends = list(accumulate((end - start for _, start, end in pieces), initial=0))
        self.works = list(accumulate((row.between(start, end) for _, start, end in pieces), initial=0))
        self.begins = list(accumulate((not start for _, start, _ in pieces), initial=0))

    @property
    def tokens(self) -> int:
        return self.ends[-1]

    def work(self, tokens: int) -> int:
        whole = bisect_right(self.ends, tokens) - 1
        work, left = self.works[whole], tokens - self.ends[whole]
        if not left:
            return work
        start = self.pieces[whole].start
        return work + self.row.between(start, start + left)

    def begun(self, tokens: int) -> int:
        # how many of them are the beginnings of documents
        return self.begins[bisect_left(self.ends, tokens)]


class Dealer:
    # What of a row is not dealt yet. ``limit``: the tokens that a part is to receive at most.

    def __init__(self, row: RowCosts, limit: int) -> None:
        self.row, self.limit = row, limit
        # (-length, document) of what is left of documents from the first token on: the shortest, which are taken most
        # often, are the last
        self.begun = sorted((-length, document) for document, length in enumerate(row.lengths) if length)
        self.rests: list[Piece] = []  # of documents whose first token is dealt

    def deal(self, part: Part) -> None:
        while part.tokens:
            piece = self.heaviest(part)
            lights = self.lights(part, part.tokens - piece.tokens, self.slack(part) - piece.start, piece)
            if self.fits(part, piece, lights):
                self.take(part, piece, (piece.start, piece.end))
                self.fill(part, lights)
            else:
                self.cut(part, piece)

    def whole(self, at: int) -> Piece:
        length, document = self.begun[at]
        return Piece(document, 0, -length)

    def remove(self, piece: Piece) -> None:
        if piece.start:
            self.rests.remove(piece)
        else:
            del self.begun[bisect_left(self.begun, (-piece.end, piece.document))]

    def keep(self, piece: Piece) -> None:
        if piece.tokens > 0:
            if piece.start:
                self.rests.append(piece)
            else:
                insort(self.begun, (-piece.end, piece.document))

    def take(self, part: Part, piece: Piece, *taken: tuple[int, int]) -> None:
        # these ranges of a piece, the lowest first
        self.remove(piece)
        document, start, end = piece
        for first, last in taken:
            if first < last:
                self.keep(Piece(document, start, first))
                part.pieces.append(Piece(document, first, last))
                part.tokens -= last - first
                part.done += self.row.between(first, last)
                start = last
        self.keep(Piece(document, start, end))

    def take_lights(self, part: Part, lights: _Lights, tokens: int) -> None:
        whole = bisect_right(lights.ends, tokens) - 1
        for piece in lights.pieces[:whole]:
            self.remove(piece)
        part.pieces += lights.pieces[:whole]
        part.tokens -= lights.ends[whole]
        part.done += lights.works[whole]
        if tokens > lights.ends[whole]:
            piece = lights.pieces[whole]
            self.take(part, piece, (piece.start, piece.start + tokens - lights.ends[whole]))

    def slack(self, part: Part) -> int:
        return self.limit - self.row.received(part.pieces)

    def heaviest(self, part: Part) -> Piece:
        # Of those that are heavy for this part, the one that ends last. Light ones are for filling parts up.
        found = [*self.rests, *([self.whole(0)] if self.begun else [])]
        heavy = [piece for piece in found if piece.start + piece.end >= 2 * part.work / part.tokens]
        if heavy:
            return max(heavy, key=lambda piece: piece.end)
        return max(found, key=lambda piece: piece.start + piece.end)

    def lights(self, part: Part, tokens: int, spare: int, without: Piece) -> _Lights:
        # Short documents. What is left of one that was cut comes with those of its length, if the part may receive so
        # much more.
        found: list[Piece] = []
        short = part.size // 2
        rests = sorted(
            (each for each in self.rests if each.end <= short and each != without), key=lambda each: -each.end
        )
        for at in range(len(self.begun) - 1, -1, -1):
            piece = self.whole(at)
            while tokens > 0 and rests and rests[-1].end <= piece.end:
                spare -= rests[-1].start
                if spare < 0:
                    rests = []
                else:
                    tokens -= rests[-1].tokens
                    found.append(rests.pop())
            if tokens <= 0 or piece.end > short:
                break
            if piece != without:
                tokens -= piece.tokens
                found.append(piece)
        return _Lights(self.row, found)

    def fits(self, part: Part, piece: Piece, lights: _Lights) -> bool:
        left = part.tokens - piece.tokens
        if left < 0:
            return False
        light = min(left, lights.tokens)
        work = self.row.of(piece) + lights.work(light) + self.row.until(left - light)
        return work <= part.work + NEAR * part.mean

    def fill(self, part: Part, lights: _Lights) -> None:
        # Whole documents, the longest that fits first. If none does, the next longer one is cut.
        while part.tokens <= lights.tokens:
            if part.work - lights.work(part.tokens) <= NEAR * part.mean:
                return self.take_lights(part, lights, part.tokens)
            longer = len(self.begun) - lights.begun(part.tokens)
            at = self.longest(part, lights, longer)
            if at < longer:
                piece = self.whole(at)
                self.take(part, piece, (piece.start, piece.end))
            elif at:
                return self.cut(part, self.whole(at - 1))
            else:
                return self.take_lights(part, lights, part.tokens)

    def longest(self, part: Part, lights: _Lights, longer: int) -> int:
        # the first of the ``longer`` ones that fits; ``fits`` would do, but this is asked most often
        work, tokens, begun, until = part.work + NEAR * part.mean, part.tokens, self.begun, self.row.until

        def fits(at: int) -> bool:
            length = -begun[at][0]
            return length <= tokens and until(length) + lights.work(tokens - length) <= work

        return first_that(0, longer, fits)

    def cut(self, part: Part, piece: Piece) -> None:
        # A window does not see a document's beginning from its end, so that holding both does not help.
        tight = piece.end > self.limit and self.row.window is None
        if tight and not part.pieces:
            self.limit = self.least(part, piece)
        slack = self.slack(part)
        cut = _Cut(self.row, piece, part.tokens, slack, self.lights(part, part.tokens, slack - piece.end, piece))
        if cut.work(0) > part.work:
            cut.lights = _Lights(self.row, cut.lights.pieces + self.others(part, piece, cut.lights))
            cut.slack = first_that(slack, max(slack, piece.end), lambda slack: cut.work(0, slack) <= part.work)
        end = cut.longest(part.work)
        if tight and piece.end - end > slack and len(self.begun) + len(self.rests) > 1:
            end = cut.longest(part.work + (MOST - 1) * part.mean)
        beginning, light = cut.shares(end)
        if end + beginning >= piece.tokens:
            beginning, end = 0, min(piece.tokens, part.tokens)
        self.take(part, piece, (piece.start, piece.start + beginning), (piece.end - end, piece.end))
        self.take_lights(part, cut.lights, light)

    def others(self, part: Part, piece: Piece, lights: _Lights) -> list[Piece]:
        # the lightest beginnings of longer documents, as many as can be of use
        last = bisect_left(self.begun, (-(part.size // 2), 0))
        found = [self.whole(at) for at in range(max(0, last - OTHERS), last)] + self.rests
        found = [each for each in found if each != piece and each not in lights.pieces]
        return sorted(found, key=lambda each: (each.start, each.end))

    def least(self, part: Part, piece: Piece) -> int:
        # the lowest limit, from the present one on, with which a document can be dealt
        lights = self.lights(part, FILLED * part.size, 0, piece)
        step = max(1, piece.end // STEPS)
        steps = (piece.end - self.limit) // step + 1
        return self.limit + step * first_that(
            0, steps, lambda at: self.holds(part, piece, self.limit + step * at, lights)
        )

    def holds(self, part: Part, piece: Piece, limit: int, lights: _Lights) -> bool:
        # A part that has token ``end`` of a document has at least ``end - limit`` of the tokens before it. It takes the
        # longest end that leaves it enough work for as many of the beginning.
        _, start, end = piece
        used = 0

        def left(tokens: int) -> float:
            # work, behind what fills the part up
            filled, all_filled = min(used, lights.tokens), min(used + part.size - tokens, lights.tokens)
            return MOST * part.mean + lights.work(filled) - lights.work(all_filled)

        while end > limit:
            if end - start <= part.size and self.row.between(start, end) <= left(end - start):
                return start <= limit
            held = end - limit
            if held > min(part.size, end - start - 1):
                return False
            longest = self.row.longest(start, end, held, left(held))
            if longest == held and not start:
                return True
            if longest * SLOWEST < held:
                return False
            start, end, used = start + held - longest, end - longest, used + part.size - held
        return True


class _Cut:
    # A part that gets the end of a piece and something light. Of the piece's beginning it gets what it would receive
    # above ``slack`` otherwise, and as much as nothing light is there for.

    def __init__(self, row: RowCosts, piece: Piece, tokens: int, slack: int, lights: _Lights) -> None:
        self.row, self.piece, self.tokens, self.slack, self.lights = row, piece, tokens, slack, lights

    def shares(self, end: int, slack: int | None = None) -> tuple[int, int]:
        # the tokens of the beginning, and the light ones
        left, free = self.tokens - end, self.piece.tokens - end
        beginning = 0
        if self.row.window is None:
            beginning = min(max(self.piece.end - end - (self.slack if slack is None else slack), 0), left, free)
        light = min(left - beginning, self.lights.tokens)
        return beginning + min(left - beginning - light, free - beginning), light

    def work(self, end: int, slack: int | None = None) -> int:
        beginning, light = self.shares(end, slack)
        _, first, last = self.piece
        missing = self.tokens - end - beginning - light
        own = self.row.between(last - end, last) + self.row.between(first, first + beginning)
        return own + self.lights.work(light) + self.row.until(missing)

    def longest(self, work: float) -> int:
        # the longest end that is not too much work
        most = min(self.tokens, self.piece.tokens)
        return first_that(1, most + 1, lambda end: self.work(end) > work) - 1
