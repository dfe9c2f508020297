"""The part of every row that a process holds agrees with a table of all tokens."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fa2patch.documents.boundaries import Boundaries
from fa2patch.documents.parts import Part


@st.composite
def split_batches(draw):
    """Rows of documents, some of them empty, and the number of parts."""
    of, length, rows = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    whole = of * length
    cuts = [sorted(draw(st.lists(st.integers(0, whole), max_size=4))) for _ in range(rows)]
    ends = [0] + [row * whole + cut for row, own in enumerate(cuts) for cut in (*own, whole)]
    cu = torch.tensor(ends, dtype=torch.int32)
    return Boundaries(cu, int(cu.diff().max())), of, (rows, length)


def documents_of(boundaries, shape):
    """For each token the number of its document, ``[batch, length]``."""
    return torch.repeat_interleave(torch.arange(len(boundaries)), boundaries.cu_seqlens.diff().long()).view(shape)


@given(split_batches())
def test_a_part_is_a_slice_of_the_rows(batch):
    boundaries, of, shape = batch
    whole = Part(0, of).rows(shape)
    numbers = torch.arange(whole[0] * whole[1]).view(whole)
    parts = [Part(number, of).own(numbers) for number in range(of)]
    assert torch.equal(torch.cat(parts, dim=1), numbers)
    for number, own in enumerate(parts):
        here = Part(number, of).here(numbers.flatten(), shape)
        expected = torch.full((numbers.numel(),), shape[0] * shape[1])
        expected[own.flatten()] = torch.arange(own.numel())
        assert torch.equal(here, expected)


@given(split_batches())
def test_clipped_lengths_count_what_the_part_holds_of_each_document(batch):
    boundaries, of, shape = batch
    of_tokens = documents_of(boundaries, Part(0, of).rows(shape))
    for number in range(of):
        part = Part(number, of)
        held = torch.bincount(part.own(of_tokens).flatten(), minlength=len(boundaries))
        assert torch.equal(part.clipped(boundaries.cu_seqlens, shape).diff().long(), held)


@given(split_batches())
def test_documents_are_given_if_each_lies_in_one_part(batch):
    boundaries, of, shape = batch
    parts = [Part(number, of) for number in range(of)]
    of_tokens = documents_of(boundaries, parts[0].rows(shape))
    held = [set(part.own(of_tokens)[row].tolist()) for row in range(shape[0]) for part in parts]
    cut = len(set().union(*held)) < sum(map(len, held))
    for part in parts:
        found = part.documents(boundaries, shape)
        assert (found is None) == cut
        if found is not None:
            clipped = part.clipped(boundaries.cu_seqlens, shape)
            assert [n for n in found.lengths if n] == [n for n in clipped.diff().tolist() if n]
            assert found.max_seqlen == max(found.lengths)


def test_a_tree_is_not_cut():
    tree = Boundaries(torch.tensor([0, 2, 4], dtype=torch.int32), 2, parents=torch.tensor([-1, 0], dtype=torch.int32))
    assert Part(0, 2).documents(tree, (1, 2)) is None


@pytest.mark.parametrize("number", [0, 1])
def test_the_last_token_of_a_document_that_goes_on_is_not_an_end(number):
    """Shifted labels: document [0, 3) ends in the second part, whose first token is its last."""
    ends = torch.tensor([3, 4]) - 1
    assert Part(number, 2).here(ends, (1, 2)).tolist() == [[2, 2], [0, 1]][number]
