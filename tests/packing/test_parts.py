"""Parts of a packed row hold as many tokens as consecutive ones, have nearly equal work and receive few keys."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa2patch.documents.parts import Order, consecutive, head_and_tail
from fa2patch.packing import PackingError, part_dealer, part_pieces, part_swapper, parts
from fa2patch.packing.parts import AIM, balanced, measured

DRAWN = settings(deadline=None, derandomize=True, database=None, max_examples=150)

LENGTHS = st.lists(st.integers(0, 3) | st.integers(0, 90), max_size=12)
WINDOWS = st.none() | st.integers(1, 40)

# Lengths of documents as in fine-tuning on chats, in mixtures with a long tail, and of long documents.
KINDS = {
    "chat": lambda random: random.lognormal(6.4, 1),
    "mixed": lambda random: random.lognormal(7.6, 1.4),
    "long": lambda random: random.integers(16384, 49152),
}
SEEDS = range(4)


def row(kind: str, tokens: int, seed: int) -> list[int]:
    random, lengths = np.random.default_rng(seed), []
    while sum(lengths) < tokens:
        lengths.append(max(1, min(int(KINDS[kind](random)), tokens - sum(lengths))))
    return lengths


def counted(lengths: list[int], order: Order, window: int | None) -> tuple[list[int], list[int]]:
    # token by token: what a query of a part sees, and which of these the part does not hold
    documents = np.repeat(np.arange(len(lengths)), lengths)
    received, work = [], []
    for start, end in zip(order.starts[:-1], order.starts[1:]):
        own = order.tokens[start:end].tolist()
        sees = [
            {
                key
                for key in range(max(0, query - (window or query + 1) + 1), query + 1)
                if documents[key] == documents[query]
            }
            for query in own
        ]
        received.append(len(set().union(*sees) - set(own)))
        work.append(sum(map(len, sees)))
    return received, work


def least(lengths: list[int], number: int) -> int:
    """No order within the aim lets the busiest part receive less."""
    # A part that has token ``end`` of a document, and receives at most ``limit``, has ``end - limit`` tokens before it.
    # Whatever their number, a part can take no longer end than if these others are the lightest that are left.
    size, most = -(-sum(lengths) // number), AIM * sum(n * (n + 1) // 2 for n in lengths) / number

    def possible(length: int, limit: int) -> bool:
        start, end = 0, length
        while end - limit > 0:
            held, room = end - limit, most + length  # a part may stop just before a token that is too much
            if held > min(size, end - start):
                return False
            ends = np.arange(held + 1)
            work = ends * (2 * end + 1 - ends) // 2 + (held - ends) * (2 * start + 1 + held - ends) // 2
            longest = int(np.searchsorted(work, room, side="right")) - 1
            if longest < 1:
                return False
            start, end = start + held - longest, end - longest
        return True

    found = 0
    for length in lengths:
        if length > size or length * (length + 1) // 2 > most:
            low, high = found, length
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if possible(length, middle) else (middle + 1, high)
            found = low
    return found


@DRAWN
@given(lengths=LENGTHS, number=st.integers(1, 9), window=WINDOWS)
def test_every_token_is_in_one_part_in_the_order_of_the_row(lengths, number, window):
    order = balanced(lengths, number, window)
    assert sorted(order.tokens) == list(range(sum(lengths)))
    assert order.sizes == consecutive(sum(lengths), number).sizes
    assert all((np.diff(order.tokens[a:b]) > 0).all() for a, b in zip(order.starts[:-1], order.starts[1:]))
    again = balanced(np.array(lengths, np.int32), number, window)
    assert order.tokens.tolist() == again.tokens.tolist() and order.sizes == again.sizes


@DRAWN
@given(lengths=LENGTHS, number=st.integers(1, 5), window=WINDOWS, seed=st.none() | st.integers(0, 9))
def test_what_an_order_costs_is_counted_token_by_token(lengths, number, window, seed):
    order = balanced(lengths, number, window)
    if seed is not None:
        order = Order(np.random.default_rng(seed).permutation(order.length), order.sizes)
    found = measured(lengths, order, window)
    assert (found.received.tolist(), found.work.tolist()) == counted(lengths, order, window)


@pytest.mark.parametrize(("tokens", "number"), [(131072, 8), (131072, 64), (1048576, 64)])
@pytest.mark.parametrize("kind", KINDS)
def test_work_is_equal_and_no_part_receives_more_than_with_consecutive_parts(kind, tokens, number):
    rows = [row(kind, tokens, seed) for seed in (SEEDS if tokens < 2**20 else SEEDS[:2])]
    found = [measured(lengths, balanced(lengths, number)) for lengths in rows]
    plain = [measured(lengths, consecutive(tokens, number)) for lengths in rows]
    assert max(each.work.max() / each.work.mean() for each in found) <= AIM
    assert max(each.work.max() / each.work.mean() for each in plain) > 1.4
    # Consecutive parts receive less where they happen to cut documents near their starts, and are busy for it.
    bounds = [max(each.received.max(), least(lengths, number)) for each, lengths in zip(plain, rows)]
    assert sum(each.received.max() for each in found) <= 1.05 * sum(bounds)
    assert all(each.received.max() <= 1.25 * bound for each, bound in zip(found, bounds))


@pytest.mark.parametrize(("tokens", "number"), [(4096, 2), (131072, 8), (131072, 64), (100003, 7)])
def test_one_document(tokens, number):
    found = measured([tokens], balanced([tokens], number))
    size = -(-tokens // number)
    assert found.work.max() / found.work.mean() <= 1.01
    assert found.received.max() <= tokens - size
    if tokens % (2 * number) == 0:
        assert found.received.max() <= measured([tokens], head_and_tail(tokens, number)).received.max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [1024, 4096, 2**20])
def test_windows(kind, window):
    for seed in SEEDS:
        lengths = row(kind, 131072, seed)
        found = measured(lengths, balanced(lengths, 8, window), window)
        assert found.work.max() / found.work.mean() <= AIM
        assert found.received.max() <= 2.5 * measured(lengths, consecutive(131072, 8), window).received.max()
    if window == 2**20:
        assert balanced(lengths, 8, window).tokens.tolist() == balanced(lengths, 8).tokens.tolist()


def test_short_documents_stay_whole():
    lengths = [20000, *np.random.default_rng(0).integers(100, 900, 500).tolist()]
    pieces = np.bincount(parts.Pieces.of(lengths, balanced(lengths, 16)).documents)
    assert (pieces > 1).sum() <= 17, "the long one, and one for each part, which is to have just so many tokens"
    # the long one has the work of 12 parts, and each of these has its end and its beginning at most
    assert pieces[0] <= 24 and pieces.sum() <= len(lengths) + 24 + 16


def test_nearly_equal_work_is_left_as_it_is():
    for lengths in ([64] * 16, [64, 0] * 8, [], [0], [0, 0], [1]):
        assert balanced(lengths, 4).tokens.tolist() == list(range(sum(lengths)))
    assert balanced([], 3).sizes == (0, 0, 0) and balanced([1], 3).sizes == (1, 0, 0)
    assert balanced([200, 1, 1, 1], 2).tokens.tolist() != list(range(203))


def test_arguments_are_checked():
    for wrong, message in (([1.5], "expected integers"), ([-1], "from 0"), ([2**31 - 1] * 2, r"fewer than 2\*\*31")):
        with pytest.raises(PackingError, match=message):
            balanced(wrong, 2)
    for arguments, message in (((0,), "parts: expected a positive"), ((2, 0), "window: expected a positive")):
        with pytest.raises(PackingError, match=message):
            balanced([3], *arguments)


# --- what the tests above see ------------------------------------------------------------------------------


def fails(test, *arguments):
    with pytest.raises(AssertionError):
        test(*arguments)


def test_a_part_that_lacks_a_token_is_seen(monkeypatch):
    joined = part_swapper.joined
    monkeypatch.setattr(part_swapper, "joined", lambda pieces: joined([each for each in pieces if each.end != 7]))
    order = balanced([60, 7, 7, 9], 3)
    assert sorted(order.tokens) != list(range(83))


def test_parts_without_the_beginning_of_their_document_are_seen(monkeypatch):
    monkeypatch.setattr(part_dealer.Dealer, "least", lambda self, part, piece: self.limit)
    monkeypatch.setattr(part_swapper.Swapper, "swap", lambda self, limit: None)
    fails(test_work_is_equal_and_no_part_receives_more_than_with_consecutive_parts, "mixed", 131072, 8)


def test_parts_that_swap_nothing_are_seen(monkeypatch):
    monkeypatch.setattr(part_swapper.Swapper, "swap", lambda self, limit: None)
    fails(test_work_is_equal_and_no_part_receives_more_than_with_consecutive_parts, "long", 131072, 64)


def test_parts_of_head_and_tail_are_seen(monkeypatch):
    monkeypatch.setitem(globals(), "balanced", lambda lengths, number: head_and_tail(sum(lengths), number))
    fails(test_work_is_equal_and_no_part_receives_more_than_with_consecutive_parts, "chat", 131072, 64)


def test_work_that_forgets_the_window_is_seen(monkeypatch):
    between = part_pieces.RowCosts.between
    monkeypatch.setattr(
        part_pieces.RowCosts, "between", lambda self, *ends: between(part_pieces.RowCosts(self.lengths, None), *ends)
    )
    fails(test_windows, "mixed", 1024)
