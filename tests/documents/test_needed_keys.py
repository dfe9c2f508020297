"""Parts of split rows get the keys that their pieces of documents see, and no others."""

import random

import numpy as np
import pytest
import torch

from fa2patch.documents.boundaries import Boundaries
from fa2patch.documents.needed_keys import exchange_of
from fa2patch.documents.parts import Order, Part, Pieces, consecutive, head_and_tail
from fa2patch.documents.tensors import ends_of


def split_of(seed):
    # an order, the number of its parts, how many rows, and the lengths of their documents
    drawn = random.Random(seed)
    parts, rows, lengths = drawn.randint(1, 5), drawn.choice([1, 1, 2]), []
    order = consecutive(drawn.randint(1, 40), parts)
    if seed % 3 == 1:
        order = head_and_tail(2 * parts * drawn.randint(1, 5), parts)
    elif seed % 3 == 2:
        order = Order(np.array(drawn.sample(range(order.length), order.length)), order.sizes)
    for _ in range(rows):
        left = order.length
        while left:
            lengths.append(drawn.randint(0, min(left, drawn.choice([3, 10, 40]))))
            left -= lengths[-1]
    return order, parts, rows, lengths


SEEDS = range(200)


def tokens_of(order, rows):
    # of each part, whose rows are laid end to end
    pieces = np.split(order.tokens, order.starts[1:-1])
    return [np.concatenate([piece + row * order.length for row in range(rows)]) for piece in pieces]


def seen_by(token, lengths, causal, window):
    ends = np.cumsum(lengths)
    at = np.searchsorted(ends, token, side="right")
    first = ends[at] - lengths[at]
    keys = range(first, token + 1 if causal else ends[at])
    return {key for key in keys if window is None or token - key < window}


@pytest.mark.parametrize("causal, window", [(False, None), (True, None), (True, 1), (True, 2), (True, 7)])
def test_each_query_sees_its_keys_and_no_key_is_sent_in_vain(causal, window):
    for seed in SEEDS:
        check_keys(*split_of(seed), causal, window)


def check_keys(order, parts, rows, lengths, causal, window):
    tokens, pieces = tokens_of(order, rows), Pieces.of(lengths, order, rows)
    found = [exchange_of(pieces, part, parts, causal, window) for part in range(parts)]
    sent = [np.split(own[one.sends], np.cumsum(one.sizes[0])[:-1]) for own, one in zip(tokens, found)]
    for part, (own, one) in enumerate(zip(tokens, found)):
        received = np.concatenate([sent[other][part] for other in range(parts)])
        assert [len(sent[other][part]) for other in range(parts)] == one.sizes[1]
        keys, queries, needed = np.concatenate([own, received])[one.keys], iter(own), set()
        ends = np.cumsum(one.key_lengths)
        for count, end, many in zip(one.lengths, ends, one.key_lengths):
            of_piece = keys[end - many : end]
            for at in range(count):  # as kernels count: the last query is at the last key
                query, last = next(queries), many - count + at
                reach = slice(max(0, last - window + 1) if window else 0, last + 1 if causal else None)
                assert {*of_piece[reach].tolist()} == seen_by(query, lengths, causal, window)
                needed |= seen_by(query, lengths, causal, window)
        assert len({*received}) == len(received) and {*received.tolist()} <= needed - {*own.tolist()}
        assert one.any_sent == any(len(runs) for of_part in sent for runs in of_part)


def test_a_part_of_any_order():
    for seed in SEEDS:
        check_part(*split_of(seed))


def check_part(order, parts, rows, lengths):
    tokens, every = tokens_of(order, rows), torch.arange(rows * order.length)
    boundaries = Boundaries(ends_of(lengths, torch.device("cpu")), max(lengths), None, tuple(lengths))
    for number, own in enumerate(tokens):
        part, shape = Part(number, parts, order), (rows, order.sizes[number])
        assert part.rows(shape) == (rows, order.length)
        assert torch.equal(part.own(every.view(rows, -1)).flatten(), torch.from_numpy(own))
        here = part.here(every, shape)
        places = {int(token): place for place, token in enumerate(own)}
        assert here.tolist() == [places.get(token, len(own)) for token in every.tolist()]
        assert part.here(torch.tensor([len(every)]), shape).tolist() == [len(own)]
        clipped = part.clipped(boundaries, shape)
        counted = boundaries.positions_of((rows, order.length)).flatten()[own]
        starts = {*clipped[:-1].tolist()}
        goes_on = [at for at in range(1, len(own)) if counted[at] != counted[at - 1] + 1]
        assert starts.issuperset(goes_on) and clipped[-1] == len(own)


def test_documents_that_lie_whole_in_a_part():
    for seed in SEEDS:
        check_whole(*split_of(seed))


def check_whole(order, parts, rows, lengths):
    tokens = tokens_of(order, rows)
    owner = np.empty(rows * order.length, int)
    for number, own in enumerate(tokens):
        owner[own] = number
    boundaries = Boundaries(ends_of(lengths, torch.device("cpu")), max(lengths), None, tuple(lengths))
    ends = np.cumsum(lengths)
    whole = [np.arange(end - length, end) for end, length in zip(ends, lengths) if length]
    for number, own in enumerate(tokens):
        found = Part(number, parts, order).documents(boundaries, (rows, order.sizes[number]))
        in_one = all(len({*owner[document]}) == 1 for document in whole)
        side_by_side = all(
            tuple(document) in _runs(own, document) for document in whole if owner[document[0]] == number
        )
        if found is not None:
            assert in_one and side_by_side
            assert found.lengths == tuple(len(one) for one in _in_order(own, whole, owner, number))
        elif in_one:
            assert not all(tuple(document) in _runs(tokens[owner[document[0]]], document) for document in whole), (
                "all documents lie whole"
            )


def _runs(own, document):
    at = np.flatnonzero(own == document[0])
    return [tuple(own[start : start + len(document)]) for start in at]


def _in_order(own, whole, owner, number):
    first = {document[0]: document for document in whole if owner[document[0]] == number}
    return [first[token] for token in own if token in first]


def test_the_orders_of_torch():
    assert head_and_tail(8, 2).tokens.tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert consecutive(7, 4).sizes == (2, 2, 2, 1) and consecutive(3, 2).sizes == (2, 1)
    assert consecutive(5, 4).sizes == (2, 2, 1, 0), "as torch.chunk cuts"
    assert head_and_tail(8, 2) is head_and_tail(8, 2)
    with pytest.raises(ValueError):
        head_and_tail(10, 4)
