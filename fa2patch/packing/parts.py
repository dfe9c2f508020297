"""Which tokens of a packed row each process holds, so that all have as many tokens and as much attention to compute.

An engine that cuts rows into consecutive parts gives the end of a long document to one process, which then computes
several times the mean. Here the parts are dealt one after the other: the longest document, then shorter ones until the
part has its tokens and its attention. A document with more attention than a part may have is cut. The part gets its
end, and the next part what is left of it. Then pieces are swapped where a part would receive many keys.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, product
from typing import Any, Callable, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..documents.needed_keys import ranges, seen_by, sent
from ..documents.parts import Order, Pieces, consecutive
from ..errors import PackingError
from .budget import as_lengths, positive

# The busiest part's attention, in means. The aim is a tenth above the mean: consecutive parts within it stay. Parts are
# dealt up to less, and usually up to even less, because the last ones have to take what is left.
AIM, MOST, USUAL = 1.1, 1.08, 1.05

NEAR = 0.02  # of the mean: a part of whole documents is near enough, and nothing is cut for less

# No part is to receive more than consecutive parts do. Documents are dealt with a limit of this share of it. It holds
# where few are cut. Where most are, parts go beyond it, and pieces are swapped until none is above the last share. The
# second limit is for rows that are not dealt within the aim otherwise.
LIMITS = (0.7, 1.2), 0.95
# With a window every piece lacks nearly as many keys, and a part of equal work has two, one of them light.
WINDOWED = (2, 3), 2

# How many pieces are looked at for a swap. This takes a third of a second at most, and a hundredth in most rows.
LOOKS = 30_000

# How far a look ahead goes: short documents that fill so many parts, so many limits, and at least so much of a document
# in each part; and the longer documents that are looked at to fill a part up. More hardly changes anything.
FILLED, STEPS, SLOWEST, OTHERS, HEAVIEST = 12, 400, 50, 50, 8


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
    work = _Row(lengths, window).between(starts, starts + pieces.lengths)
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
    row, best = _Row(given, window), None
    limits, last = LIMITS if row.window is None else WINDOWED
    for limit in limits:
        dealt = _dealt(row, plain.sizes, int(limit * received.max()), int(last * received.max()))
        if best is None or dealt.busiest < best.busiest:
            best = dealt
        if best.busiest <= AIM:
            break
    assert best is not None
    return best.order()


class _Piece(NamedTuple):
    document: int
    start: int
    end: int

    @property
    def tokens(self) -> int:
        return self.end - self.start


class _Row:
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

    def of(self, piece: _Piece) -> int:
        return self.between(piece.start, piece.end)

    def longest(self, start: int, end: int, held: int, work: float) -> int:
        # of ``held`` tokens at both ends of start..end, so many at the end are not too much work
        def too_much(last: int) -> bool:
            return self.between(end - last, end) + self.between(start, start + held - last) > work

        return _first(1, held + 1, too_much) - 1

    def received(self, pieces: Sequence[_Piece]) -> int:
        # A document's second piece has what the first one received.
        cut = {document for document, start, _ in pieces if start}
        count, before = 0, _Piece(-1, 0, 0)
        for piece in sorted(piece for piece in pieces if piece.document in cut):
            has = before.end if piece.document == before.document else 0
            count += piece.start - max(has, 0 if self.window is None else piece.start - self.window + 1)
            before = piece
        return count


def _first(low: int, high: int, holds: Callable[[int], bool]) -> int:
    # The least number from low on for which it holds, which then does for all above it; high if there is none before.
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _dealt(row: _Row, sizes: Sequence[int], limit: int, swapped: int) -> _Swapper:
    dealer, parts, tokens, work = _Dealer(row, limit), [], 0, 0
    for size in sizes:
        mean = row.work * size / row.tokens
        late = row.work * (tokens + size) / row.tokens - work
        left = (row.work - work) * size / max(row.tokens - tokens, 1)
        part = _Part(size, min(max(late, left), USUAL * mean), mean)
        dealer.deal(part)
        parts.append(part)
        tokens, work = tokens + size, work + part.done
    swapper = _Swapper(row, sizes, parts)
    swapped = max(swapped, dealer.limit, 1)
    swapper.swap(max(swapped, swapper.received))  # where the work is too much
    swapper.swap(swapped)
    return swapper


class _Part:
    # A part that is dealt. ``tokens`` and ``work`` are what it lacks.

    def __init__(self, size: int, all_work: float, mean: float) -> None:
        self.size = self.tokens = size
        self.all_work, self.done, self.mean = all_work, 0, mean
        self.pieces: list[_Piece] = []

    @property
    def work(self) -> float:
        return self.all_work - self.done


class _Lights:
    # Pieces that fill a part up, the lightest first, and of the last one only its beginning.

    def __init__(self, row: _Row, pieces: list[_Piece]) -> None:
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


class _Dealer:
    # What of a row is not dealt yet. ``limit``: the tokens that a part is to receive at most.

    def __init__(self, row: _Row, limit: int) -> None:
        self.row, self.limit = row, limit
        # (-length, document) of what is left of documents from the first token on: the shortest, which are taken most
        # often, are the last
        self.begun = sorted((-length, document) for document, length in enumerate(row.lengths) if length)
        self.rests: list[_Piece] = []  # of documents whose first token is dealt

    def deal(self, part: _Part) -> None:
        while part.tokens:
            piece = self.heaviest(part)
            lights = self.lights(part, part.tokens - piece.tokens, self.slack(part) - piece.start, piece)
            if self.fits(part, piece, lights):
                self.take(part, piece, (piece.start, piece.end))
                self.fill(part, lights)
            else:
                self.cut(part, piece)

    def whole(self, at: int) -> _Piece:
        length, document = self.begun[at]
        return _Piece(document, 0, -length)

    def remove(self, piece: _Piece) -> None:
        if piece.start:
            self.rests.remove(piece)
        else:
            del self.begun[bisect_left(self.begun, (-piece.end, piece.document))]

    def keep(self, piece: _Piece) -> None:
        if piece.tokens > 0:
            if piece.start:
                self.rests.append(piece)
            else:
                insort(self.begun, (-piece.end, piece.document))

    def take(self, part: _Part, piece: _Piece, *taken: tuple[int, int]) -> None:
        # these ranges of a piece, the lowest first
        self.remove(piece)
        document, start, end = piece
        for first, last in taken:
            if first < last:
                self.keep(_Piece(document, start, first))
                part.pieces.append(_Piece(document, first, last))
                part.tokens -= last - first
                part.done += self.row.between(first, last)
                start = last
        self.keep(_Piece(document, start, end))

    def take_lights(self, part: _Part, lights: _Lights, tokens: int) -> None:
        whole = bisect_right(lights.ends, tokens) - 1
        for piece in lights.pieces[:whole]:
            self.remove(piece)
        part.pieces += lights.pieces[:whole]
        part.tokens -= lights.ends[whole]
        part.done += lights.works[whole]
        if tokens > lights.ends[whole]:
            piece = lights.pieces[whole]
            self.take(part, piece, (piece.start, piece.start + tokens - lights.ends[whole]))

    def slack(self, part: _Part) -> int:
        return self.limit - self.row.received(part.pieces)

    def heaviest(self, part: _Part) -> _Piece:
        # Of those that are heavy for this part, the one that ends last. Light ones are for filling parts up.
        found = [*self.rests, *([self.whole(0)] if self.begun else [])]
        heavy = [piece for piece in found if piece.start + piece.end >= 2 * part.work / part.tokens]
        if heavy:
            return max(heavy, key=lambda piece: piece.end)
        return max(found, key=lambda piece: piece.start + piece.end)

    def lights(self, part: _Part, tokens: int, spare: int, without: _Piece) -> _Lights:
        # Short documents. What is left of one that was cut comes with those of its length, if the part may receive so
        # much more.
        found: list[_Piece] = []
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

    def fits(self, part: _Part, piece: _Piece, lights: _Lights) -> bool:
        left = part.tokens - piece.tokens
        if left < 0:
            return False
        light = min(left, lights.tokens)
        work = self.row.of(piece) + lights.work(light) + self.row.until(left - light)
        return work <= part.work + NEAR * part.mean

    def fill(self, part: _Part, lights: _Lights) -> None:
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

    def longest(self, part: _Part, lights: _Lights, longer: int) -> int:
        # the first of the ``longer`` ones that fits; ``fits`` would do, but this is asked most often
        work, tokens, begun, until = part.work + NEAR * part.mean, part.tokens, self.begun, self.row.until

        def fits(at: int) -> bool:
            length = -begun[at][0]
            return length <= tokens and until(length) + lights.work(tokens - length) <= work

        return _first(0, longer, fits)

    def cut(self, part: _Part, piece: _Piece) -> None:
        # A window does not see a document's beginning from its end, so that holding both does not help.
        tight = piece.end > self.limit and self.row.window is None
        if tight and not part.pieces:
            self.limit = self.least(part, piece)
        slack = self.slack(part)
        cut = _Cut(self.row, piece, part.tokens, slack, self.lights(part, part.tokens, slack - piece.end, piece))
        if cut.work(0) > part.work:
            cut.lights = _Lights(self.row, cut.lights.pieces + self.others(part, piece, cut.lights))
            cut.slack = _first(slack, max(slack, piece.end), lambda slack: cut.work(0, slack) <= part.work)
        end = cut.longest(part.work)
        if tight and piece.end - end > slack and len(self.begun) + len(self.rests) > 1:
            end = cut.longest(part.work + (MOST - 1) * part.mean)
        beginning, light = cut.shares(end)
        if end + beginning >= piece.tokens:
            beginning, end = 0, min(piece.tokens, part.tokens)
        self.take(part, piece, (piece.start, piece.start + beginning), (piece.end - end, piece.end))
        self.take_lights(part, cut.lights, light)

    def others(self, part: _Part, piece: _Piece, lights: _Lights) -> list[_Piece]:
        # the lightest beginnings of longer documents, as many as can be of use
        last = bisect_left(self.begun, (-(part.size // 2), 0))
        found = [self.whole(at) for at in range(max(0, last - OTHERS), last)] + self.rests
        found = [each for each in found if each != piece and each not in lights.pieces]
        return sorted(found, key=lambda each: (each.start, each.end))

    def least(self, part: _Part, piece: _Piece) -> int:
        # the lowest limit, from the present one on, with which a document can be dealt
        lights = self.lights(part, FILLED * part.size, 0, piece)
        step = max(1, piece.end // STEPS)
        steps = (piece.end - self.limit) // step + 1
        return self.limit + step * _first(0, steps, lambda at: self.holds(part, piece, self.limit + step * at, lights))

    def holds(self, part: _Part, piece: _Piece, limit: int, lights: _Lights) -> bool:
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

    def __init__(self, row: _Row, piece: _Piece, tokens: int, slack: int, lights: _Lights) -> None:
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
        return _first(1, most + 1, lambda end: self.work(end) > work) - 1


class _Swap(NamedTuple):
    # what becomes of a part and of the one that it swaps with: pieces, work and tokens received
    ours: tuple[list[_Piece], int, int]
    theirs: tuple[list[_Piece], int, int]


class _Swapper:
    # Pieces change places with as many tokens of other parts.

    def __init__(self, row: _Row, sizes: Sequence[int], parts: Iterable[_Part]) -> None:
        self.row, self.sizes, self.looks = row, tuple(sizes), LOOKS
        self.most = [MOST * row.work * size / row.tokens for size in sizes]
        self.parts = [(_joined(part.pieces), part.done, row.received(part.pieces)) for part in parts]

    @property
    def received(self) -> int:
        return max(received for _, _, received in self.parts)

    @property
    def busiest(self) -> float:
        return max(work for _, work, _ in self.parts) * len(self.parts) / self.row.work

    def order(self) -> Order:
        documents, starts, ends = np.array([*zip(*(piece for part, _, _ in self.parts for piece in part))])
        first = np.cumsum([0, *self.row.lengths])[documents]
        return Order(ranges(first + starts, first + ends), self.sizes)

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

    def ill(self, number: int, part: tuple[list[_Piece], int, int], limit: int) -> float:
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
                        taken = _Piece(where.document, start, start + piece.tokens)
                        self.looks -= len(theirs) + len(ours)
                        swap = self.swapped(worst, piece, other, where, taken)
                        if swap and swap.theirs[2] <= limit:
                            yield other, swap

    def swapped(self, worst: int, piece: _Piece, other: int, where: _Piece, taken: _Piece) -> _Swap | None:
        # None if the other part would have too much work, or this one more than it has
        (ours, work, _), (theirs, other_work, _) = self.parts[worst], self.parts[other]
        more = self.row.of(piece) - self.row.of(taken)
        if other_work + more > self.most[other] or work - more > max(self.most[worst], work - 1):
            return None
        left = _Piece(where.document, where.start, taken.start), _Piece(where.document, taken.end, where.end)
        theirs = _joined([*(each for each in theirs if each != where), *left, piece])
        ours = _joined([*(each for each in ours if each != piece), taken])
        return _Swap(
            (ours, work - more, self.row.received(ours)), (theirs, other_work + more, self.row.received(theirs))
        )


def _joined(pieces: Iterable[_Piece]) -> list[_Piece]:
    # in the order of the row, and without those that have no tokens
    found: list[_Piece] = []
    for piece in sorted(pieces):
        if found and found[-1].document == piece.document and found[-1].end == piece.start:
            found[-1] = _Piece(piece.document, found[-1].start, piece.end)
        elif piece.tokens:
            found.append(piece)
    return found
