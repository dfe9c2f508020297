"""What boundaries give: lengths, positions, chunks, spans of tokens that see later ones, and parts of rows."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fa2patch.documents import tensors
from fa2patch.documents.boundaries import Boundaries
from fa2patch.documents.given_boundaries import from_cu_seqlens
from fa2patch.documents.parts import Part
from fa2patch.documents.spans import last_seen
from fa2patch.errors import PackingNotIsolated


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_lengths_are_read_at_most_once_and_only_if_asked_for(monkeypatch):
    reads, read = [], tensors.read
    monkeypatch.setattr(tensors, "read", lambda tensor: reads.append(tensor) or read(tensor))
    found = Boundaries(ints(0, 2, 5), 3)
    assert len(found) == 2 and not reads
    assert found.lengths == found.lengths == (2, 3)
    assert len(reads) == 1


@pytest.mark.parametrize(
    ("cu", "shape", "positions"),
    [
        ((0, 3, 5), (1, 5), [[0, 1, 2, 0, 1]]),
        ((0, 0, 3, 3, 5, 5), (1, 5), [[0, 1, 2, 0, 1]]),
        ((0, 1, 2), (1, 2), [[0, 0]]),
        ((0, 3, 4, 6), (2, 3), [[0, 1, 2], [0, 0, 1]]),
    ],
)
def test_positions_count_from_0_in_each_document(cu, shape, positions):
    found = Boundaries(ints(*cu), 0).positions_of(shape)
    assert found.tolist() == positions
    assert found.dtype == torch.int64


def test_padding_is_cut_off_the_documents_that_it_ends():
    stated = from_cu_seqlens(ints(0, 5, 8, 10), 5, (1, 10))
    apart = stated.padding_apart(torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1, 0, 0]]))
    assert apart.lengths == (3, 2, 3, 0, 0, 2) and apart.max_seqlen == 5


def test_chunks_are_documents_cut_up_and_the_last_are_empty():
    found = from_cu_seqlens(torch.tensor([0, 5, 16, 17]), 11, (1, 17)).chunked(4, 17)
    assert found.lengths == (4, 1, 4, 4, 3, 1, 0) and found.max_seqlen == 4
    assert found.cu_seqlens.tolist() == [0, 4, 5, 9, 13, 16, 17, 17] and found.cu_seqlens.dtype == torch.int32
    whole = from_cu_seqlens(torch.tensor([0, 5, 16, 17]), 11, (1, 17))
    assert whole.chunked(11, 17) is whole


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7).filter(any), st.integers(1, 9))
def test_chunks_have_the_lengths_of_their_documents(lengths, size):
    ends = torch.tensor([0, *lengths]).cumsum(0)
    found = from_cu_seqlens(ends, max(lengths), (1, sum(lengths))).chunked(size, sum(lengths))
    cut = [min(size, length - at) for length in lengths for at in range(0, length, size)]
    assert [length for length in found.lengths if length] == cut
    assert len(found) <= len(lengths) + sum(lengths) // size


def test_chunks_are_made_without_a_read(monkeypatch):
    whole = from_cu_seqlens(torch.tensor([0, 5, 16, 17]), 11, (1, 17))
    monkeypatch.setattr(tensors, "read", lambda tensor: pytest.fail("read"))
    assert len(whole.chunked(4, 17)) == 7


# spans

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


# parts


@st.composite
def split_batches(draw):
    # Some of the documents are empty. ``of`` is the number of parts.
    of, length, rows = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    whole = of * length
    cuts = [sorted(draw(st.lists(st.integers(0, whole), max_size=4))) for _ in range(rows)]
    ends = [0] + [row * whole + cut for row, own in enumerate(cuts) for cut in (*own, whole)]
    cu = torch.tensor(ends, dtype=torch.int32)
    return Boundaries(cu, int(cu.diff().max())), of, (rows, length)


def documents_of(boundaries, shape):
    # The number of each token's document, [batch, length].
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
        assert torch.equal(part.clipped(boundaries, shape).diff().long(), held)


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
            clipped = part.clipped(boundaries, shape)
            assert [n for n in found.lengths if n] == [n for n in clipped.diff().tolist() if n]
            assert found.max_seqlen == max(found.lengths)


def test_a_tree_is_not_cut():
    tree = Boundaries(torch.tensor([0, 2, 4], dtype=torch.int32), 2, parents=torch.tensor([-1, 0], dtype=torch.int32))
    assert Part(0, 2).documents(tree, (1, 2)) is None


@pytest.mark.parametrize("number", [0, 1])
def test_the_last_token_of_a_document_that_goes_on_is_not_an_end(number):
    # Labels are shifted: document [0, 3) ends in the second part, whose first token is its last.
    ends = torch.tensor([3, 4]) - 1
    assert Part(number, 2).here(ends, (1, 2)).tolist() == [[2, 2], [0, 1]][number]


@pytest.mark.parametrize("device", ["cpu", "cuda:1", "mps", "xpu"])
def test_only_a_cuda_device_is_sent_to_without_waiting(device):
    # Apple's then holds what its memory holds later, silently.
    given = []

    class Numbers:
        def to(self, device, non_blocking):
            given.append((str(device), non_blocking))

    tensors.to_device(Numbers(), torch.device(device))
    assert given == [(device, device == "cuda:1")]


def test_numbers_go_to_a_device_in_one_way():
    package = Path(tensors.__file__).parents[1]
    lines = [line for file in package.rglob("*.py") for line in file.read_text("utf-8").splitlines()]
    sent = [line for line in lines if "non_blocking" in line]
    assert len(sent) == 2 and all("NOT_WAITED_FOR" in line for line in sent)
