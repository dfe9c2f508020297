"""Spans: runs of tokens of one document that see each other in both directions."""

import pytest
import torch

from fa2patch.documents.boundaries import Boundaries
from fa2patch.documents.spans import last_seen
from fa2patch.errors import PackingNotIsolated

CU = torch.tensor([0, 3, 3, 8], dtype=torch.int32)


def until(*numbers, cu=CU, real=None, prefixes=False):
    blocks = torch.tensor(numbers)
    return last_seen(blocks, cu, blocks.shape, real, prefixes).tolist()


def test_a_block_ends_at_a_document_and_at_another_number():
    assert until([-1, 0, 0, 0, 0, 1, 1, -1]) == [0, 2, 2, 4, 4, 6, 6, 7]


def test_a_block_ends_at_a_row():
    cu = torch.tensor([0, 4, 8], dtype=torch.int32)
    assert until([-1, -1, 5, 5], [5, 5, -1, 5][:2] + [-1, -1], cu=cu) == [0, 1, 3, 3, 5, 5, 6, 7]


def test_one_row_of_numbers_stands_for_all_rows():
    cu = torch.tensor([0, 2, 3, 6], dtype=torch.int32)
    assert last_seen(torch.zeros(1, 1, dtype=torch.long), cu, (2, 3), None, True).tolist() == [1, 1, 2, 5, 5, 5]


def test_padding_is_in_no_block():
    real = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0]])
    assert until([0] * 8, real=real, prefixes=True) == [2, 2, 2, 4, 4, 5, 6, 7]


def test_two_pieces_of_a_block_are_refused_in_one_document_only():
    assert until([0, -1, -1, 0, 0, -1, -1, -1]) == [0, 1, 2, 4, 4, 5, 6, 7]
    with pytest.raises(PackingNotIsolated, match="two pieces of one document"):
        until([-1, -1, -1, 0, -1, -1, 0, -1])


def test_a_prefix_begins_its_document():
    assert until([0, 0, -1, 0, -1, -1, -1, -1], prefixes=True) == [1, 1, 2, 3, 4, 5, 6, 7]
    with pytest.raises(PackingNotIsolated, match="does not begin the document"):
        until([-1, 0, 0, -1, -1, -1, -1, -1], prefixes=True)


def test_spans_and_their_keys():
    found = Boundaries(CU, 5, until=torch.tensor([0, 2, 2, 4, 4, 6, 6, 7], dtype=torch.int32)).spans
    assert found.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert found.keys.tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 6]
    assert (found.counts, found.key_counts, found.longest) == ((2, 2, 2), (3, 2, 4), 2)


def test_no_spans():
    found = Boundaries(CU, 5, until=torch.arange(8, dtype=torch.int32)).spans
    assert (found.counts, found.longest, len(found.tokens)) == ((), 0, 0)
    assert Boundaries(CU, 5).spans is None
