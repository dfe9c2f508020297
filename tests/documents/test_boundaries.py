"""Where documents start (rule 2 of CONTRIBUTING.md): row by row, from every source, compared with a slow loop."""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fa2patch
from fa2patch.documents import device, stated
from fa2patch.documents.boundaries import Boundaries, largest, positions_of
from fa2patch.documents.find import recognise
from fa2patch.documents.stated import from_cu_seqlens
from fa2patch.errors import BadCuSeqlens, BadPositionIds, BoundaryConflict, Fa2PatchError

CPU = torch.device("cpu")
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

RULE_2 = {
    "ids that never reach 0": ([7, 8, 9, 0, 1, 2], (3, 3)),
    "a restart at 1": ([0, 1, 2, 1, 2, 3], (3, 3)),
    "a jump ahead": ([0, 1, 2, 5, 6, 7], (3, 3)),
    "a document of one token": ([0, 0, 1, 2], (1, 3)),
    "only documents of one token": ([0, 0, 0], (1, 1, 1)),
    "no 0 at all": ([2, 3, 4, 2, 3], (3, 2)),
    "one document": ([0, 1, 2, 3], (4,)),
    "one document that goes on": ([7, 8, 9], (3,)),
    "ids that fall": ([3, 2, 1, 0], (1, 1, 1, 1)),
    "one token": ([5], (1,)),
}


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def recognised(position_ids=None, attention_mask=None, seq_idx=None, **settings):
    given = {"position_ids": position_ids, "attention_mask": attention_mask, "seq_idx": seq_idx}
    tensors = {name: torch.tensor(ids) for name, ids in given.items() if ids is not None}
    shape = next(tuple(ids.shape) for ids in tensors.values())
    return recognise(shape, CPU, **tensors, **settings)


@pytest.fixture
def reads(monkeypatch):
    seen = []
    original = device.read

    def host(tensor):
        seen.append(tensor)
        return original(tensor)

    monkeypatch.setattr(device, "read", host)
    return seen


# position_ids


@pytest.mark.parametrize(("ids", "lengths"), RULE_2.values(), ids=RULE_2)
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_a_document_starts_where_ids_are_not_contiguous(ids, lengths, dtype):
    found = fa2patch.boundaries(torch.tensor([ids], dtype=dtype))
    assert found.lengths == lengths
    assert found.cu_seqlens.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert found.max_seqlen == max(lengths)
    assert len(found) == len(lengths)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_cu_seqlens_are_int32_on_the_same_device_and_max_seqlen_is_an_int(dtype):
    ids = torch.tensor([[0, 1, 0]], dtype=dtype)
    found = fa2patch.boundaries(ids)
    assert isinstance(found, fa2patch.Boundaries)
    assert found.cu_seqlens.dtype == torch.int32
    assert found.cu_seqlens.device == ids.device
    assert type(found.max_seqlen) is int
    assert all(type(length) is int for length in found.lengths)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8], ids=str)
def test_the_largest_id_of_a_dtype_is_not_followed_by_its_smallest(dtype):
    limits = torch.iinfo(dtype)
    ids = torch.tensor([limits.max - 1, limits.max, limits.min, limits.min + 1], dtype=dtype)
    assert fa2patch.boundaries(ids).lengths == (2, 2)


@pytest.mark.parametrize("wrap", [lambda ids: ids, lambda ids: ids[None], lambda ids: ids[None, None]])
def test_ids_may_have_one_two_or_three_dimensions(wrap):
    ids = wrap(torch.tensor([0, 1, 2, 0, 1]))
    assert fa2patch.boundaries(ids).cu_seqlens.tolist() == [0, 3, 5]


def test_rows_are_flattened_one_after_another():
    found = fa2patch.boundaries(torch.tensor([[0, 1, 2, 0], [0, 0, 1, 2]]))
    assert found.cu_seqlens.tolist() == [0, 3, 4, 5, 8]
    assert found.max_seqlen == 3


def test_a_document_never_reaches_into_the_next_row():
    assert fa2patch.boundaries(torch.tensor([[0, 1, 2], [3, 4, 5]])).lengths == (3, 3)


def test_of_three_axes_the_first_is_read():
    axes = torch.tensor([[[0, 1, 0, 1]], [[0, 0, 0, 0]], [[3, 2, 1, 0]]])
    assert fa2patch.boundaries(axes).lengths == (2, 2)


def test_ids_that_are_not_contiguous_in_memory_are_read_right():
    ids = torch.tensor([[0, 9], [1, 9], [0, 9], [1, 9]]).t()[:1]
    assert fa2patch.boundaries(ids).lengths == (2, 2)


def test_ids_are_left_as_they_were():
    ids = torch.tensor([[3, 4, 0, 1]])
    before = ids.clone()
    fa2patch.boundaries(ids)
    assert torch.equal(ids, before)


def test_positions_are_what_a_rotary_table_must_hold():
    ids = torch.tensor([[7, 8, 9, 0, 1]])
    assert fa2patch.boundaries(ids).positions == 10
    assert recognise((1, 5), CPU, position_ids=ids).positions == 10
    assert recognise((1, 5), CPU, seq_idx=torch.tensor([[0, 0, 1, 1, 1]])).positions is None
    assert largest(ids) == 9


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 1, 2], "expected an integer tensor, found list. Pass what the collator returns."),
        (None, "expected an integer tensor, found NoneType. Pass what the collator returns."),
        (torch.zeros(1, 4), "expected integers, found torch.float32. Convert them with .long()."),
        (torch.zeros(1, 4, dtype=torch.bfloat16), "expected integers, found torch.bfloat16."),
        (torch.zeros(1, 4, dtype=torch.bool), "expected integers, found torch.bool."),
        (torch.tensor(3), "with at least one token; found []."),
        (torch.zeros(1, 1, 1, 4, dtype=torch.long), "with at least one token; found [1, 1, 1, 4]."),
        (torch.zeros(0, dtype=torch.long), "with at least one token; found [0]."),
        (torch.zeros(2, 0, dtype=torch.long), "with at least one token; found [2, 0]."),
        (torch.zeros(0, 4, dtype=torch.long), "with at least one token; found [0, 4]."),
    ],
)
def test_what_are_no_position_ids_is_refused(ids, message):
    with pytest.raises(BadPositionIds) as error:
        fa2patch.boundaries(ids)
    assert message in str(error.value)
    assert str(error.value).startswith("position_ids: ")
    assert isinstance(error.value, ValueError)
    assert isinstance(error.value, Fa2PatchError)


def test_boundaries_read_the_device_once(reads):
    found = fa2patch.boundaries(torch.tensor([[0, 1, 0]]))
    assert found.lengths == (2, 1)
    assert len(reads) == 1


def test_lengths_are_read_at_most_once_and_only_if_asked_for(reads):
    stated = Boundaries(ints(0, 2, 5), 3)
    assert len(stated) == 2
    assert len(reads) == 0
    assert stated.lengths == stated.lengths == (2, 3)
    assert len(reads) == 1


# recognise


@pytest.mark.parametrize(
    ("position_ids", "attention_mask"),
    [
        pytest.param([[0, 1, 2, 3]], None, id="dense"),
        pytest.param([[0, 1, 2], [0, 1, 2]], None, id="dense, two rows"),
        pytest.param([[0, 1, 2, 3]], [[1, 1, 1, 1]], id="dense with a mask"),
        pytest.param([[7, 8, 9]], None, id="a later chunk"),
        pytest.param([[1, 1, 0, 1, 2], [0, 1, 2, 3, 4]], [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], id="left-padded"),
        pytest.param([[0, 1, 2, 3, 4]], [[0, 0, 1, 1, 1]], id="left-padded, ids counted from the row's start"),
        pytest.param([[0, 1, 2, 3, 4]], [[1, 1, 1, 0, 0]], id="right-padded"),
        pytest.param([[0, 1, 2, 1, 1]], [[1, 1, 1, 0, 0]], id="right-padded, ids 1 at padding"),
        pytest.param([[0, 1, 2, 0, 0]], [[1, 1, 1, 0, 0]], id="right-padded, ids 0 at padding"),
        pytest.param([[1, 1, 0, 1, 1]], [[0, 0, 1, 1, 0]], id="padded on both sides"),
        pytest.param([[0, 1, 1, 1, 2, 3]], [[1, 1, 0, 0, 1, 1]], id="a hole that ids don't count"),
        pytest.param([[0, 1, 2, 3, 4, 5]], [[1, 1, 0, 0, 1, 1]], id="a hole that ids count"),
        pytest.param([[0, 1, 9, 9, 4, 5]], [[1, 1, 0, 0, 1, 1]], id="a hole that ids count, others at padding"),
        pytest.param([[0, 0, 0], [0, 1, 2]], [[0, 0, 0], [1, 1, 1]], id="a row of padding"),
        pytest.param(None, [[1, 1, 0, 0]], id="a mask alone"),
        pytest.param(None, [[1, 1, 0, 1]], id="a mask with a hole alone"),
        pytest.param(None, [[True, True, False]], id="a bool mask alone"),
        pytest.param(None, [[2, 2, 2, 0]], id="one document, numbered 2"),
    ],
)
def test_rows_of_one_document_are_not_packed(position_ids, attention_mask):
    assert recognised(position_ids, attention_mask) is None


def test_a_seq_idx_of_one_document_a_row_is_not_packed():
    assert recognised(seq_idx=[[0, 0, 0], [1, 1, 1]]) is None


def test_without_any_source_nothing_is_packed():
    assert recognise((2, 4), CPU) is None


@pytest.mark.parametrize(("ids", "lengths"), [row for row in RULE_2.values() if len(row[1]) > 1])
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_packed_rows_are_recognised_by_contiguity(ids, lengths, dtype):
    found = recognise((1, len(ids)), CPU, position_ids=torch.tensor([ids], dtype=dtype))
    assert found.lengths == lengths
    assert found.cu_seqlens.tolist() == fa2patch.boundaries(torch.tensor([ids])).cu_seqlens.tolist()
    assert found.cu_seqlens.dtype == torch.int32
    assert type(found.max_seqlen) is int


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8], ids=str)
def test_packed_rows_are_recognised_where_a_dtype_ends(dtype):
    limits = torch.iinfo(dtype)
    ids = torch.tensor([[limits.max - 1, limits.max, limits.min, limits.min + 1]], dtype=dtype)
    assert recognise((1, 4), CPU, position_ids=ids).lengths == (2, 2)


def test_one_packed_row_makes_the_batch_packed():
    assert recognised([[0, 1, 2, 3], [0, 1, 0, 1]]).lengths == (4, 2, 2)


@pytest.mark.parametrize("position_ids", [torch.tensor([0, 1, 0]), torch.tensor([[0, 1, 0]])], ids=["1-D", "one row"])
def test_ids_of_one_row_serve_every_row(position_ids):
    assert recognise((2, 3), CPU, position_ids=position_ids).lengths == (2, 1, 2, 1)


def test_of_three_axes_recognise_reads_the_first():
    axes = torch.tensor([[[0, 1, 0, 1]], [[0, 1, 2, 3]], [[0, 1, 2, 3]]])
    assert recognise((1, 4), CPU, position_ids=axes).lengths == (2, 2)
    assert recognise((1, 4), CPU, position_ids=axes.flip(0)) is None


@pytest.mark.parametrize(
    ("position_ids", "attention_mask", "lengths"),
    [
        pytest.param([[0, 1, 0, 1, 2, 0, 0]], [[1, 1, 1, 1, 1, 0, 0]], (2, 3, 2), id="trailing"),
        pytest.param([[0, 1, 0, 1, 2, 3, 4]], [[1, 1, 1, 1, 1, 0, 0]], (2, 3, 2), id="trailing, ids go on"),
        pytest.param([[0, 0, 0, 1, 0, 1]], [[0, 0, 1, 1, 1, 1]], (2, 2, 2), id="leading"),
        pytest.param([[1, 1, 0, 1, 0, 1]], [[0, 0, 1, 1, 1, 1]], (2, 2, 2), id="leading, ids 1 at padding"),
        pytest.param([[0, 1, 1, 1, 0, 1]], [[1, 1, 0, 0, 1, 1]], (2, 2, 2), id="middle"),
        pytest.param([[0, 1, 2, 3, 0, 1]], [[1, 1, 0, 0, 1, 1]], (2, 2, 2), id="middle, ids go on"),
        pytest.param([[1, 0, 1, 1, 0, 1, 1]], [[0, 1, 1, 0, 1, 1, 0]], (1, 2, 1, 2, 1), id="everywhere"),
        pytest.param(
            [[0, 1, 0, 1], [0, 1, 1, 1], [1, 0, 1, 2], [0, 0, 0, 0]],
            [[1, 1, 1, 1], [1, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0]],
            (2, 2, 2, 2, 1, 3, 4),
            id="rows that are not packed beside one that is",
        ),
    ],
)
def test_a_run_of_padding_is_a_document_of_its_own(position_ids, attention_mask, lengths):
    assert recognised(position_ids, attention_mask).lengths == lengths


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.uint8, torch.int64], ids=str)
def test_a_mask_of_any_dtype_tells_padding(dtype):
    mask = torch.tensor([[1, 1, 1, 0]], dtype=dtype)
    found = recognise((1, 4), CPU, position_ids=torch.tensor([[0, 0, 1, 2]]), attention_mask=mask)
    assert found.lengths == (1, 2, 1)


@pytest.mark.parametrize(
    ("mask", "lengths"),
    [
        pytest.param([[1, 1, 2, 2, 2, 0]], (2, 3, 1), id="trailing padding"),
        pytest.param([[0, 1, 1, 2]], (1, 2, 1), id="leading padding"),
        pytest.param([[1, 0, 0, 2, 2]], (1, 2, 2), id="padding between"),
        pytest.param([[1, 2, 1, 2]], (1, 1, 1, 1), id="numbers that return"),
        pytest.param([[5, 5, 3, 9]], (2, 1, 1), id="numbers in no order"),
        pytest.param([[1, 1, 2], [1, 1, 1]], (2, 1, 3), id="one packed row of two"),
    ],
)
def test_a_mask_of_document_numbers_says_where_documents_are(mask, lengths):
    assert recognised(attention_mask=mask).lengths == lengths


@pytest.mark.parametrize("position_ids", [[[0, 1, 0, 1, 2, 0]], [[0, 1, 2, 3, 4, 5]], [[3, 4, 0, 1, 2, 9]]])
def test_document_numbers_win_over_position_ids(position_ids):
    assert recognised(position_ids, [[1, 1, 2, 2, 2, 0]]).lengths == (2, 3, 1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_seq_idx_says_where_documents_are(dtype):
    seq_idx = torch.tensor([[0, 0, 1, 1, 1, 2], [4, 4, 4, 4, 4, 4]], dtype=dtype)
    assert recognise((2, 6), CPU, seq_idx=seq_idx).lengths == (2, 3, 1, 6)


@pytest.mark.parametrize("position_ids", [[[0, 1, 0, 1, 2]], [[0, 1, 2, 3, 4]]])
def test_seq_idx_wins_over_position_ids(position_ids):
    assert recognised(position_ids, seq_idx=[[0, 0, 1, 1, 1]]).lengths == (2, 3)


@pytest.mark.parametrize("mask", [[[1, 1, 1, 1, 0]], [[1, 1, 2, 2, 0]]], ids=["padding", "document numbers"])
def test_seq_idx_beside_a_mask(mask):
    assert recognised(attention_mask=mask, seq_idx=[[0, 0, 1, 1, 1]]).lengths == (2, 2, 1)


@pytest.mark.parametrize(
    ("sources", "source"),
    [
        ({"seq_idx": [[0, 0, 0, 1, 1]]}, "seq_idx"),
        ({"attention_mask": [[1, 1, 1, 2, 2]]}, "the attention_mask of document numbers"),
    ],
)
def test_ids_that_restart_inside_a_stated_document_are_an_error(sources, source):
    with pytest.raises(BoundaryConflict) as error:
        recognised(position_ids=[[0, 1, 0, 1, 2]], **sources)
    assert f"position_ids restart inside what {source} calls one document: at row 0, token 2." in str(error.value)
    assert isinstance(error.value, ValueError)


def test_a_conflict_names_row_and_token():
    with pytest.raises(BoundaryConflict, match="row 1, token 3"):
        recognised([[0, 1, 0, 1], [0, 1, 2, 0]], seq_idx=[[0, 0, 1, 1], [0, 0, 0, 0]])


@pytest.mark.parametrize(
    "numbers",
    [[[1, 1, 2, 2, 3, 3]], [[2, 2, 2, 2, 2, 2]], [[1, 1, 2, 3, 3, 3]]],
    ids=["other documents", "one document", "more documents"],
)
def test_document_numbers_and_seq_idx_of_different_documents_are_an_error(numbers):
    with pytest.raises(BoundaryConflict, match="seq_idx and the attention_mask of document numbers begin different"):
        recognised(attention_mask=numbers, seq_idx=[[0, 0, 0, 1, 1, 1]])


@pytest.mark.parametrize(
    "sources",
    [
        {"position_ids": [[0, 1, 0, 9, 1, 2]], "attention_mask": [[1, 1, 1, 0, 1, 1]]},
        {"attention_mask": [[1, 1, 2, 0, 2, 2]]},
        {"seq_idx": [[0, 0, 1, 1, 1, 1]], "attention_mask": [[1, 1, 1, 0, 1, 1]]},
    ],
    ids=["position_ids", "document numbers", "seq_idx"],
)
def test_a_hole_inside_a_document_of_a_packed_row_is_an_error(sources):
    with pytest.raises(BoundaryConflict) as error:
        recognised(**sources)
    assert "hides tokens inside a document of a packed row (it goes on at row 0, token 4)" in str(error.value)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(1, 5, dtype=torch.long), "expected [2, 4] as the batch's ids, found [1, 5]."),
        (torch.zeros(3, 4, dtype=torch.long), "expected [2, 4] as the batch's ids, found [3, 4]."),
        (torch.zeros(3, 3, 4, dtype=torch.long), "expected [2, 4] as the batch's ids, found [3, 3, 4]."),
        (torch.zeros(5, dtype=torch.long), "expected [2, 4] as the batch's ids, found [5]."),
        (torch.zeros(2, 4), "found torch.float32"),
    ],
)
def test_ids_of_another_batch_are_refused(ids, message):
    with pytest.raises(BadPositionIds) as error:
        recognise((2, 4), CPU, position_ids=ids)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "shape",
    [
        (3, 5),
        (5,),
        (4, 6),
        (3, 1, 6),
        (2, 6),
        (),
    ],
    ids=str,
)
def test_a_seq_idx_of_another_batch_is_refused(shape):
    with pytest.raises(BadCuSeqlens) as error:
        recognise((3, 6), CPU, seq_idx=torch.zeros(shape, dtype=torch.int32))
    assert f"seq_idx: expected [3, 6], found {list(shape)}." in str(error.value)


@pytest.mark.parametrize("seq_idx", [torch.tensor([0, 0, 1]), torch.tensor([[0, 0, 1]])], ids=["1-D", "one row"])
def test_a_seq_idx_of_one_row_serves_every_row(seq_idx):
    assert recognise((2, 3), CPU, seq_idx=seq_idx).lengths == (2, 1, 2, 1)


def test_recognise_reads_the_device_once_whatever_is_given(reads):
    found = recognised([[0, 1, 0, 1, 2]], [[1, 1, 2, 2, 0]], [[0, 0, 1, 1, 1]])
    assert found.lengths == (2, 2, 1)
    assert len(reads) == 1


# from_cu_seqlens


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("shape", [(4,), (1, 4)], ids=["[n+1]", "[1, n+1]"])
@pytest.mark.parametrize("longest", [3, torch.tensor(3), torch.tensor([1, 3, 2]), None], ids=repr)
def test_stated_boundaries_are_taken(dtype, shape, longest):
    stated = from_cu_seqlens(torch.tensor([0, 1, 4, 6], dtype=dtype).view(shape), longest, (1, 6))
    assert stated.cu_seqlens.tolist() == [0, 1, 4, 6]
    assert stated.cu_seqlens.dtype == torch.int32
    assert type(stated.max_seqlen) is int
    assert stated.max_seqlen == 3
    assert stated.lengths == (1, 3, 2)


def test_a_longest_document_may_be_stated_too_long():
    assert from_cu_seqlens(ints(0, 1, 4, 6), 7, (1, 6)).max_seqlen == 7


def test_int32_lengths_are_not_copied():
    cu = ints(0, 2, 4)
    assert from_cu_seqlens(cu, 2, (1, 4)).cu_seqlens.data_ptr() == cu.data_ptr()


def test_documents_without_tokens_are_kept():
    stated = from_cu_seqlens(ints(0, 0, 2, 2, 5, 5), None, (1, 5), position_ids=torch.tensor([[0, 1, 0, 1, 2]]))
    assert stated.lengths == (0, 2, 0, 3, 0)
    assert stated.max_seqlen == 3


def test_lengths_of_several_rows_run_over_the_whole_batch():
    ids = torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1]])
    assert from_cu_seqlens(ints(0, 4, 6, 8), 4, (2, 4), position_ids=ids).lengths == (4, 2, 2)


@pytest.mark.parametrize(
    ("cu", "found"),
    [
        ([0, 4], "found list"),
        (torch.tensor([0.0, 4.0]), "found torch.float32 [2]"),
        (torch.tensor([False, True]), "found torch.bool [2]"),
        (ints(0), "found torch.int32 [1]"),
        (torch.tensor(0), "found torch.int64 []"),
    ],
)
def test_what_are_no_lengths_is_refused(cu, found):
    with pytest.raises(BadCuSeqlens) as error:
        from_cu_seqlens(cu, 4, (1, 4))
    assert "expected an integer tensor [documents + 1], " + found in str(error.value)
    with pytest.raises(BadCuSeqlens) as error:
        from_cu_seqlens(ints(0, 4), 4, (1, 4), cu_seqlens_k=cu)
    assert found in str(error.value)


@pytest.mark.parametrize(
    ("cu", "shown"),
    [
        ((1, 6), "found [1, 6] ending in 6"),
        ((0, 5), "found [0, 5] ending in 5"),
        ((0, 7), "found [0, 7] ending in 7"),
        ((0, 4, 2, 6), "found [0, 4, 2, 6] ending in 6"),
        ((0, 3, 3), "found [0, 3, 3] ending in 3"),
        (tuple(range(12)), "found [0, 1, 2, 3, 4, 5, 6, 7, ...] ending in 11"),
    ],
)
def test_lengths_of_another_batch_are_refused(cu, shown):
    with pytest.raises(BadCuSeqlens) as error:
        from_cu_seqlens(ints(*cu), 6, (2, 3))
    assert "must rise from 0 to the number of tokens, 6 (batch x length, padding included)" in str(error.value)
    assert shown in str(error.value)
    assert isinstance(error.value, ValueError)


def test_a_longest_document_that_is_too_short_is_refused():
    with pytest.raises(BadCuSeqlens, match="max_length is 2, but cu_seq_lens hold a longer document"):
        from_cu_seqlens(ints(0, 3, 6), 2, (1, 6))
    with pytest.raises(BadCuSeqlens, match="max_length is 2"):
        from_cu_seqlens(ints(0, 3, 6), torch.tensor(2), (1, 6))


def test_keys_have_the_boundaries_of_queries():
    cu = ints(0, 3, 6)
    for cu_k in (cu, cu.clone(), cu.long(), cu[None]):
        assert from_cu_seqlens(cu, 3, (1, 6), cu_seqlens_k=cu_k).lengths == (3, 3)
    for cu_k in (ints(0, 2, 6), ints(0, 6), ints(0, 3, 3, 6)):
        with pytest.raises(BoundaryConflict, match="cu_seq_lens_q and cu_seq_lens_k differ"):
            from_cu_seqlens(cu, 3, (1, 6), cu_seqlens_k=cu_k)


@pytest.mark.parametrize(
    "ids",
    [[[0, 1, 2, 0, 1, 2]], [[0, 1, 2, 3, 4, 5]], [[7, 8, 9, 2, 3, 4]]],
    ids=["restarting", "going on", "with offsets"],
)
def test_ids_may_restart_or_go_on_where_a_stated_document_starts(ids):
    assert from_cu_seqlens(ints(0, 3, 6), 3, (1, 6), position_ids=torch.tensor(ids)).lengths == (3, 3)


@pytest.mark.parametrize("shape", [(6,), (1, 6), (1, 1, 6)])
def test_ids_that_restart_inside_a_stated_document_conflict(shape):
    ids = torch.tensor([0, 1, 0, 1, 2, 3]).view(shape)
    with pytest.raises(BoundaryConflict, match="position_ids restart inside what cu_seq_lens call one document"):
        from_cu_seqlens(ints(0, 3, 6), 3, (1, 6), position_ids=ids)


def test_uint8_ids_that_restart_inside_a_stated_document_conflict():
    ids = torch.tensor([[254, 255, 0, 1]], dtype=torch.uint8)
    with pytest.raises(BoundaryConflict):
        from_cu_seqlens(ints(0, 4), 4, (1, 4), position_ids=ids)


@pytest.mark.parametrize("cu", [(0, 8), (0, 3, 6, 8), (0, 5, 8)])
def test_a_stated_document_that_runs_on_into_the_next_row_is_refused(cu):
    with pytest.raises(BadCuSeqlens) as error:
        from_cu_seqlens(ints(*cu), 8, (2, 4))
    assert "runs on into the next row. At the first token of every row, of 4 tokens, a document" in str(error.value)


def test_ids_of_another_batch_are_refused_beside_lengths():
    with pytest.raises(BadPositionIds, match="One position id is needed for each token"):
        from_cu_seqlens(ints(0, 6), 6, (1, 6), position_ids=torch.zeros(1, 5, dtype=torch.long))
    with pytest.raises(BadPositionIds, match="expected integers"):
        from_cu_seqlens(ints(0, 6), 6, (1, 6), position_ids=torch.zeros(1, 6))


@pytest.mark.parametrize(
    ("cu", "mask"),
    [
        ((0, 3, 6), [[1, 1, 1, 1, 1, 1]]),
        ((0, 3, 6), [[1, 1, 1, 1, 0, 0]]),
        ((0, 3, 6), [[1, 1, 0, 1, 1, 0]]),
        ((0, 2, 4, 6), [[1, 1, 0, 0, 1, 1]]),
        ((0, 2, 6), [[0, 0, 1, 1, 1, 1]]),
        ((0, 3, 6), [[1, 1, 1, 2, 2, 2]]),
        ((0, 3, 6), [[True, True, True, True, True, False]]),
    ],
)
def test_padding_may_end_a_stated_document_or_be_one(cu, mask):
    lengths = tuple(b - a for a, b in zip(cu, cu[1:]))
    assert from_cu_seqlens(ints(*cu), None, (1, 6), attention_mask=torch.tensor(mask)).lengths == lengths


@pytest.mark.parametrize("mask", [[[0, 0, 1, 1, 1, 1]], [[1, 0, 1, 1, 1, 1]], [[1, 1, 1, 1, 0, 1]]])
def test_padding_before_the_real_tokens_of_a_stated_document_conflicts(mask):
    with pytest.raises(BoundaryConflict, match="hides tokens before real ones of the same document"):
        from_cu_seqlens(ints(0, 3, 6), 3, (1, 6), attention_mask=torch.tensor(mask))


def test_document_numbers_that_change_inside_a_stated_document_conflict():
    with pytest.raises(BoundaryConflict, match="document numbers change inside what cu_seq_lens call one document"):
        from_cu_seqlens(ints(0, 4), 4, (1, 4), attention_mask=torch.tensor([[1, 1, 2, 2]]))


@pytest.mark.parametrize("hidden", [float("-inf"), -1e4])
def test_a_mask_that_is_added_to_logits_conflicts_with_stated_documents(hidden):
    mask = torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, hidden]])
    with pytest.raises(BoundaryConflict, match="A mask that is added to logits cannot go with a packed row"):
        from_cu_seqlens(ints(0, 3, 6), 3, (1, 6), attention_mask=mask)


def test_ids_at_padding_say_nothing():
    ids, mask = torch.tensor([[0, 1, 2, 0, 1, 1]]), torch.tensor([[1, 1, 1, 1, 1, 0]])
    assert from_cu_seqlens(ints(0, 3, 6), 3, (1, 6), position_ids=ids, attention_mask=mask).lengths == (3, 3)


def test_with_an_int_nothing_is_read_from_a_device(reads):
    """A meta tensor holds no values, so any read fails."""
    cu = ints(0, 3, 6).to("meta")
    ids = torch.zeros(1, 6, dtype=torch.long, device="meta")
    mask = torch.ones(1, 6, device="meta")
    stated = from_cu_seqlens(cu, 3, (1, 6), cu_seqlens_k=cu.clone(), position_ids=ids, attention_mask=mask)
    assert stated.max_seqlen == 3
    assert positions_of(cu, (1, 6)).shape == (1, 6)
    assert reads == []


# positions_of


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
    for ends in (ints(*cu), ints(*cu)[None], ints(*cu).long()):
        found = positions_of(ends, shape)
        assert found.tolist() == positions
        assert found.dtype == torch.int64


# Any layout, against a loop


def slow_boundaries(rows):
    ends, token = [], 0
    for row in rows:
        for i, position in enumerate(row):
            if i == 0 or position != row[i - 1] + 1:
                ends.append(token)
            token += 1
    return [*ends, token]


def slow_starts(row, mask):
    """Return for each token whether it starts a document.

    Ids may or may not count the padding between two tokens. Other ids after padding are ambiguous and continue the
    document, unless they restart at 0.
    """
    starts, last, apart = [], None, 0
    for position, real in zip(row, mask):
        apart += 1
        goes_on = last is not None and position in (last + 1, last + apart)
        filler = last is not None and apart > 1 and position != 0
        starts.append(bool(real) and not goes_on and not filler)
        if real:
            last, apart = position, 0
    return starts


def slow_jumps(row, mask):
    """Whether a token after padding neither continues nor restarts at 0, so that it may not be a filler."""
    last, apart = None, 0
    for position, real in zip(row, mask):
        apart += 1
        if real and last is not None and apart > 1 and position not in (0, last + 1, last + apart):
            return True
        if real:
            last, apart = position, 0
    return False


def slow_recognise(rows, masks):
    """Return the cuts between documents and runs of padding, None if nothing is packed, or an error for a hole."""
    packed, hole, cuts, token = False, False, [], 0
    for row, mask in zip(rows, masks):
        starts = slow_starts(row, mask)
        packed = packed or sum(starts) > 1
        for i, (real, start) in enumerate(zip(mask, starts)):
            if start or (not real and (i == 0 or mask[i - 1])):
                cuts.append(token)
            elif real and not mask[i - 1]:
                hole = True
            token += 1
    if not packed:
        return None
    return BoundaryConflict if hole else [*cuts, token]


def slow_numbers(row, mask):
    """Return 1, 2, ... for the documents of a row, and 0 for its padding."""
    counted = itertools.accumulate(slow_starts(row, mask))
    return [count if real else 0 for count, real in zip(counted, mask)]


@st.composite
def layouts(draw, padded=False):
    """Draw rows of ids with 1 to 50 documents each, cut to the shortest row's length, and their masks."""
    lengths = draw(st.lists(st.integers(1, 8), min_size=1, max_size=50))
    offset = st.one_of(st.just(0), st.integers(0, 12))
    rows, masks = [], []
    for _ in range(draw(st.integers(1, 3))):
        row, mask = [], []
        for length in lengths:
            if padded and draw(st.integers(0, 3)) == 0:
                gap = draw(st.integers(1, 4))
                row += draw(st.lists(st.integers(0, 3), min_size=gap, max_size=gap))
                mask += [0] * gap
            start = draw(offset)
            row += range(start, start + length)
            mask += [1] * length
        rows.append(row)
        masks.append(mask)
        lengths = draw(st.permutations(lengths))
    width = min(map(len, rows))
    return [row[:width] for row in rows], [mask[:width] for mask in masks]


def holds_for_ids(layout):
    rows, _ = layout
    found = fa2patch.boundaries(torch.tensor(rows))
    cu = slow_boundaries(rows)
    assert found.cu_seqlens.tolist() == cu
    assert found.lengths == tuple(b - a for a, b in zip(cu, cu[1:]))
    assert found.max_seqlen == max(found.lengths)
    assert found.positions == max(map(max, rows)) + 1
    shape = (len(rows), len(rows[0]))
    stated = from_cu_seqlens(found.cu_seqlens, found.max_seqlen, shape, position_ids=torch.tensor(rows))
    assert stated.lengths == found.lengths
    assert fa2patch.boundaries(positions_of(found.cu_seqlens, shape)).lengths == found.lengths


def holds_for_padded(layout):
    rows, masks = layout
    numbers = [slow_numbers(row, mask) for row, mask in zip(rows, masks)]
    expected = slow_recognise(rows, masks)
    for sources in ((rows, masks), (None, numbers), (rows, numbers), (rows, masks, numbers), (None, masks, numbers)):
        try:
            found = recognised(*sources)
        except BoundaryConflict:
            found = BoundaryConflict
        if isinstance(found, Boundaries):
            assert found.max_seqlen == max(found.lengths)
            found = found.cu_seqlens.tolist()
        assert found == expected
    if any(map(slow_jumps, rows, masks)):
        with pytest.raises(BoundaryConflict, match="behind padding"):
            recognised(rows, masks, training=True)


CHECKS = {"ids": (layouts(), holds_for_ids), "padded": (layouts(padded=True), holds_for_padded)}
DRAWN = {"derandomize": True, "database": None, "deadline": None, "suppress_health_check": list(HealthCheck)}


@pytest.mark.parametrize(("layout", "check"), CHECKS.values(), ids=CHECKS)
def test_any_layout_is_cut_as_a_slow_loop_cuts_it(layout, check):
    settings(max_examples=300, **DRAWN)(given(layout)(check))()


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "check"), CHECKS.values(), ids=CHECKS)
def test_ten_thousand_layouts_are_cut_as_a_slow_loop_cuts_them(layout, check):
    settings(max_examples=10_000, **DRAWN)(given(layout)(check))()


@pytest.mark.gpu
@needs_cuda
def test_on_a_gpu_cu_seqlens_stay_there_and_stated_ones_cost_no_synchronisation():
    ids = torch.tensor([[0, 1, 2, 0, 1, 2]], device="cuda")
    found = fa2patch.boundaries(ids)
    assert found.cu_seqlens.device == ids.device
    mask = torch.ones_like(ids)
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        stated = from_cu_seqlens(found.cu_seqlens, 3, (1, 6), position_ids=ids, attention_mask=mask)
        positions = positions_of(stated.cu_seqlens, (1, 6))
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert positions.tolist() == ids.tolist()


def picture(start, height, width, frames=1):
    """Return mRoPE ids ``[3, tokens]`` of a picture, or of a film's frames."""
    t, h, w = torch.meshgrid(torch.arange(frames), torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([t.flatten(), h.flatten(), w.flatten()]) + start


def words(start, tokens):
    return (torch.arange(tokens) + start).expand(3, -1)


@pytest.mark.parametrize(
    "documents",
    [
        [[words(0, 3), picture(3, 2, 4), words(7, 2)], [words(0, 2), picture(2, 3, 2, frames=2), words(5, 1)]],
        [[picture(0, 2, 2), words(2, 3)], [picture(0, 2, 2), words(2, 1)], [words(0, 4)]],
        [[words(0, 1)], [words(0, 1), picture(1, 3, 3), words(4, 2)]],
    ],
)
def test_a_picture_is_no_boundary(documents):
    ids = torch.cat([torch.cat(parts, dim=1) for parts in documents], dim=1)[:, None]
    lengths = tuple(sum(part.shape[1] for part in parts) for parts in documents)
    assert fa2patch.boundaries(ids).lengths == lengths
    assert recognise((1, sum(lengths)), ids.device, position_ids=ids).lengths == lengths
    text = torch.cat([torch.arange(length) for length in lengths])[None, None]
    four = torch.cat([text, ids])
    assert fa2patch.boundaries(four).lengths == lengths
    cu = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    from_cu_seqlens(cu, max(lengths), (1, sum(lengths)), position_ids=ids)


def test_one_document_with_a_picture_is_not_packed():
    ids = torch.cat([words(0, 3), picture(3, 2, 4), words(7, 2)], dim=1)[:, None]
    assert recognise((1, ids.shape[-1]), ids.device, position_ids=ids) is None


@pytest.mark.parametrize("keys", [(0, 2, 6), (0, 4, 6)], ids=["earlier", "later"])
def test_keys_that_start_earlier_or_later_conflict(keys):
    with pytest.raises(BoundaryConflict, match="cu_seq_lens_q and cu_seq_lens_k differ"):
        from_cu_seqlens(ints(0, 3, 6), 4, (1, 6), cu_seqlens_k=ints(*keys))


@pytest.mark.parametrize("ends", [(0, 3, 2, 6), (0, 5, 1, 6), (1, 3, 6), (0, 3, 5)])
def test_in_a_graph_ends_that_fall_or_do_not_fit_fail_the_assertion(monkeypatch, ends):
    failed = []
    for module in (stated, device):
        monkeypatch.setattr(module, "compiling", lambda: True)
    monkeypatch.setattr(device, "assert_async", lambda held, message: failed.append(message) if not held else None)
    from_cu_seqlens(ints(0, 3, 6), 3, (1, 6))
    assert failed == []
    from_cu_seqlens(ints(*ends), 6, (1, 6))
    assert any("must rise from 0" in message for message in failed)


@pytest.mark.parametrize("ids", [[0, 1, 2, 3, 4], [0, 1, 0, 0, 2]], ids=["counted", "not counted"])
def test_ids_that_go_on_behind_padding_are_no_jump_in_training(ids):
    assert recognised([ids], [[1, 1, 0, 0, 1]], training=True) is None


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
    monkeypatch.setattr(device, "read", lambda tensor: pytest.fail("read"))
    assert len(whole.chunked(4, 17)) == 7
