"""Where documents start (rule 2 of CONTRIBUTING.md): row by row, from every source, compared with a slow loop."""

import itertools
import tracemalloc

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fa2patch
from fa2patch._torch import HAS_OPERATORS
from fa2patch.documents import find, tensors
from fa2patch.documents.boundaries import Boundaries
from fa2patch.documents.find import find_boundaries
from fa2patch.documents.given_boundaries import from_cu_seqlens
from fa2patch.documents.tensors import largest
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


def recognised(position_ids=None, attention_mask=None, seq_idx=None, **settings):
    given = {"position_ids": position_ids, "attention_mask": attention_mask, "seq_idx": seq_idx}
    said = {name: torch.tensor(ids) for name, ids in given.items() if ids is not None}
    shape = next(tuple(ids.shape[-2:]) for ids in said.values())
    return find_boundaries(shape, CPU, **said, **settings)


# position_ids alone


@pytest.mark.parametrize(("ids", "lengths"), RULE_2.values(), ids=RULE_2)
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_a_document_starts_where_ids_are_not_contiguous(ids, lengths, dtype):
    ids = torch.tensor([ids], dtype=dtype)
    before = ids.clone()
    found, packed = fa2patch.boundaries(ids), find_boundaries(tuple(ids.shape), CPU, position_ids=ids)
    assert isinstance(found, fa2patch.Boundaries)
    assert (packed is None) == (len(lengths) == 1)
    for each in (found, packed or found):
        assert each.lengths == lengths and all(type(length) is int for length in each.lengths)
        assert each.cu_seqlens.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        assert each.cu_seqlens.dtype == torch.int32 and each.cu_seqlens.device == ids.device
        assert each.max_seqlen == max(lengths) and type(each.max_seqlen) is int
        assert len(each) == len(lengths)
    assert torch.equal(ids, before)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8], ids=str)
def test_the_largest_id_of_a_dtype_is_not_followed_by_its_smallest(dtype):
    limits = torch.iinfo(dtype)
    ids = torch.tensor([limits.max - 1, limits.max, limits.min, limits.min + 1], dtype=dtype)
    assert fa2patch.boundaries(ids).lengths == find_boundaries((1, 4), CPU, position_ids=ids).lengths == (2, 2)


@pytest.mark.parametrize(
    ("ids", "ends"),
    [
        (torch.tensor([0, 1, 2, 0, 1]), [0, 3, 5]),
        (torch.tensor([[0, 1, 2, 0, 1]]), [0, 3, 5]),
        (torch.tensor([[[0, 1, 2, 0, 1]]]), [0, 3, 5]),
        (torch.tensor([[0, 1, 2, 0], [0, 0, 1, 2]]), [0, 3, 4, 5, 8]),
        (torch.tensor([[0, 1, 2], [3, 4, 5]]), [0, 3, 6]),
        (torch.tensor([[[0, 1, 0, 1]], [[0, 0, 0, 0]], [[3, 2, 1, 0]]]), [0, 2, 4]),
        (torch.tensor([[0, 9], [1, 9], [0, 9], [1, 9]]).t()[:1], [0, 2, 4]),
    ],
    ids=["1-D", "2-D", "3-D", "two rows", "no document in two rows", "three axes", "not contiguous in memory"],
)
def test_ids_of_any_shape(ids, ends):
    found = fa2patch.boundaries(ids)
    assert found.cu_seqlens.tolist() == ends
    assert found.max_seqlen == max(b - a for a, b in zip(ends, ends[1:]))


def test_positions_are_what_a_rotary_table_must_hold():
    ids = torch.tensor([[7, 8, 9, 0, 1]])
    assert fa2patch.boundaries(ids).positions == 10
    assert find_boundaries((1, 5), CPU, position_ids=ids).positions == 10
    assert find_boundaries((1, 5), CPU, seq_idx=torch.tensor([[0, 0, 1, 1, 1]])).positions is None
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


def test_the_device_is_read_once_whatever_is_given(monkeypatch):
    reads, read = [], tensors.read
    monkeypatch.setattr(tensors, "read", lambda tensor: reads.append(tensor) or read(tensor))
    monkeypatch.setattr(find, "_is_of_ones", lambda mask: False)  # it looks at masks on a CPU only
    assert fa2patch.boundaries(torch.tensor([[0, 1, 0]])).lengths == (2, 1) and len(reads) == 1
    assert recognised([[0, 1, 0, 1, 2]], [[1, 1, 2, 2, 0]], [[0, 0, 1, 1, 1]]).lengths == (2, 2, 1) and len(reads) == 2


def test_another_device_is_read_once_and_four_numbers_are_read(monkeypatch):
    # The meta device has no values. They are put in where the host reads them.
    read, meta = [], torch.device("meta")
    monkeypatch.setattr(
        tensors, "read", lambda tensor: read.append(tuple(tensor.shape)) or torch.tensor([3, 5, 0, 4]).numpy()
    )
    found = find.from_positions(torch.empty(1, 12, dtype=torch.int64, device=meta), meta, False)
    assert read == [(4,)]
    assert (len(found), found.max_seqlen, found.positions) == (3, 5, 5)
    assert find.from_positions(torch.empty(3, 4, dtype=torch.int64, device=meta), meta, False) is None


def test_a_mask_of_ones_on_a_cpu_goes_the_way_of_none(monkeypatch):
    monkeypatch.setattr(find, "_Given", None)
    for dtype in (torch.int64, torch.bool, torch.bfloat16):
        mask = torch.ones(1, 5, dtype=dtype)
        found = find_boundaries((1, 5), CPU, position_ids=torch.tensor([[0, 1, 0, 1, 2]]), attention_mask=mask)
        assert found.lengths == (2, 3)


@pytest.mark.parametrize(("hidden", "numbers"), [((0, 0), 3), ((0, 99), 8), ((99, 0), 8)], ids=["none", "end", "start"])
def test_a_mask_takes_little_memory(hidden, numbers):
    # NumPy's arrays are counted in bytes for each token. A row that leaves the cache takes longer for each token.
    tokens = 10**6
    ids, mask = torch.arange(tokens)[None] % 500, torch.ones(1, tokens, dtype=torch.int64)
    mask[:, : hidden[0]], mask[:, tokens - hidden[1] :] = 0, 0
    tracemalloc.start()
    try:
        found = find_boundaries((1, tokens), CPU, position_ids=ids, attention_mask=mask)
        assert tracemalloc.get_traced_memory()[1] < numbers * tokens
    finally:
        tracemalloc.stop()
    assert len(found) == 2000 + (hidden != (0, 0))


@pytest.mark.skipif(not HAS_OPERATORS, reason=f"torch {torch.__version__} has no custom_op")
def test_torch_accepts_the_operator():
    ids = torch.tensor([[0, 1, 0, 1, 2, 0]])
    torch.library.opcheck(torch.ops.fa2patch.documents.default, (ids,), test_utils=("test_schema", "test_faketensor"))


# every source


@pytest.mark.parametrize(
    ("position_ids", "attention_mask", "seq_idx"),
    [
        pytest.param([[0, 1, 2], [0, 1, 2]], None, None, id="dense, two rows"),
        pytest.param([[0, 1, 2, 3]], [[1, 1, 1, 1]], None, id="dense with a mask"),
        pytest.param([[1, 1, 0, 1, 2], [0, 1, 2, 3, 4]], [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], None, id="left-padded"),
        pytest.param([[0, 1, 2, 3, 4]], [[0, 0, 1, 1, 1]], None, id="left-padded, ids counted from the row's start"),
        pytest.param([[0, 1, 2, 3, 4]], [[1, 1, 1, 0, 0]], None, id="right-padded"),
        pytest.param([[0, 1, 2, 1, 1]], [[1, 1, 1, 0, 0]], None, id="right-padded, ids 1 at padding"),
        pytest.param([[0, 1, 2, 0, 0]], [[1, 1, 1, 0, 0]], None, id="right-padded, ids 0 at padding"),
        pytest.param([[1, 1, 0, 1, 1]], [[0, 0, 1, 1, 0]], None, id="padded on both sides"),
        pytest.param([[0, 1, 1, 1, 2, 3]], [[1, 1, 0, 0, 1, 1]], None, id="a hole that ids don't count"),
        pytest.param([[0, 1, 2, 3, 4, 5]], [[1, 1, 0, 0, 1, 1]], None, id="a hole that ids count"),
        pytest.param([[0, 1, 9, 9, 4, 5]], [[1, 1, 0, 0, 1, 1]], None, id="a hole that ids count, others at padding"),
        pytest.param([[0, 0, 0], [0, 1, 2]], [[0, 0, 0], [1, 1, 1]], None, id="a row of padding"),
        pytest.param(None, [[1, 1, 0, 0]], None, id="a mask alone"),
        pytest.param(None, [[1, 1, 0, 1]], None, id="a mask with a hole alone"),
        pytest.param(None, [[True, True, False]], None, id="a bool mask alone"),
        pytest.param(None, [[2, 2, 2, 0]], None, id="one document, numbered 2"),
        pytest.param(None, None, [[0, 0, 0], [1, 1, 1]], id="a seq_idx of one document a row"),
    ],
)
def test_rows_of_one_document_are_not_packed(position_ids, attention_mask, seq_idx):
    assert recognised(position_ids, attention_mask, seq_idx) is None


def test_without_any_source_nothing_is_packed():
    assert find_boundaries((2, 4), CPU) is None


@pytest.mark.parametrize("one_row", [[0, 1, 0], [[0, 1, 0]]], ids=["1-D", "one row"])
@pytest.mark.parametrize("source", ["position_ids", "seq_idx"])
def test_numbers_of_one_row_serve_every_row(one_row, source):
    numbers = torch.tensor(one_row)
    lengths = (1, 1, 1) if source == "seq_idx" else (2, 1)
    assert find_boundaries((2, 3), CPU, **{source: numbers}).lengths == lengths * 2


def test_of_three_axes_recognise_reads_the_first():
    axes = torch.tensor([[[0, 1, 0, 1]], [[0, 1, 2, 3]], [[0, 1, 2, 3]]])
    assert find_boundaries((1, 4), CPU, position_ids=axes).lengths == (2, 2)
    assert find_boundaries((1, 4), CPU, position_ids=axes.flip(0)) is None


NUMBERS = [[1, 1, 2, 2, 2, 0]]
PACKED = {
    "one packed row of two": (([[0, 1, 2, 3], [0, 1, 0, 1]],), (4, 2, 2)),
    "trailing padding": (([[0, 1, 0, 1, 2, 0, 0]], [[1, 1, 1, 1, 1, 0, 0]]), (2, 3, 2)),
    "trailing, ids go on": (([[0, 1, 0, 1, 2, 3, 4]], [[1, 1, 1, 1, 1, 0, 0]]), (2, 3, 2)),
    "leading": (([[0, 0, 0, 1, 0, 1]], [[0, 0, 1, 1, 1, 1]]), (2, 2, 2)),
    "leading, ids 1 at padding": (([[1, 1, 0, 1, 0, 1]], [[0, 0, 1, 1, 1, 1]]), (2, 2, 2)),
    "middle": (([[0, 1, 1, 1, 0, 1]], [[1, 1, 0, 0, 1, 1]]), (2, 2, 2)),
    "middle, ids go on": (([[0, 1, 2, 3, 0, 1]], [[1, 1, 0, 0, 1, 1]]), (2, 2, 2)),
    "everywhere": (([[1, 0, 1, 1, 0, 1, 1]], [[0, 1, 1, 0, 1, 1, 0]]), (1, 2, 1, 2, 1)),
    "rows that are not packed beside one that is": (
        (
            [[0, 1, 0, 1], [0, 1, 1, 1], [1, 0, 1, 2], [0, 0, 0, 0]],
            [[1, 1, 1, 1], [1, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0]],
        ),
        (2, 2, 2, 2, 1, 3, 4),
    ),
    "document numbers": ((None, NUMBERS), (2, 3, 1)),
    "numbers, leading padding": ((None, [[0, 1, 1, 2]]), (1, 2, 1)),
    "numbers, padding between": ((None, [[1, 0, 0, 2, 2]]), (1, 2, 2)),
    "numbers that return": ((None, [[1, 2, 1, 2]]), (1, 1, 1, 1)),
    "numbers in no order": ((None, [[5, 5, 3, 9]]), (2, 1, 1)),
    "numbers of one packed row of two": ((None, [[1, 1, 2], [1, 1, 1]]), (2, 1, 3)),
    "numbers and the same ids": (([[0, 1, 0, 1, 2, 0]], NUMBERS), (2, 3, 1)),
    "numbers win over ids that go on": (([[0, 1, 2, 3, 4, 5]], NUMBERS), (2, 3, 1)),
    "numbers win over ids that begin anywhere": (([[3, 4, 0, 1, 2, 9]], NUMBERS), (2, 3, 1)),
    "seq_idx": ((None, None, [[0, 0, 1, 1, 1, 2], [4, 4, 4, 4, 4, 4]]), (2, 3, 1, 6)),
    "seq_idx and the same ids": (([[0, 1, 0, 1, 2]], None, [[0, 0, 1, 1, 1]]), (2, 3)),
    "seq_idx wins over ids that go on": (([[0, 1, 2, 3, 4]], None, [[0, 0, 1, 1, 1]]), (2, 3)),
    "seq_idx beside padding": ((None, [[1, 1, 1, 1, 0]], [[0, 0, 1, 1, 1]]), (2, 2, 1)),
    "seq_idx beside numbers": ((None, [[1, 1, 2, 2, 0]], [[0, 0, 1, 1, 1]]), (2, 2, 1)),
}


@pytest.mark.parametrize(("sources", "lengths"), PACKED.values(), ids=PACKED)
def test_each_source_says_where_documents_are_and_a_run_of_padding_is_one(sources, lengths):
    assert recognised(*sources).lengths == lengths


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.uint8, torch.int64], ids=str)
def test_a_mask_of_any_dtype_tells_padding(dtype):
    mask = torch.tensor([[1, 1, 1, 0]], dtype=dtype)
    found = find_boundaries((1, 4), CPU, position_ids=torch.tensor([[0, 0, 1, 2]]), attention_mask=mask)
    assert found.lengths == (1, 2, 1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_seq_idx_of_any_dtype(dtype):
    assert find_boundaries((1, 3), CPU, seq_idx=torch.tensor([[0, 0, 1]], dtype=dtype)).lengths == (2, 1)


JUMPS = [[0, 1, 52, 53, 0, 7, 8]]  # two documents, in each of which the ids jump (PoSE)


@pytest.mark.parametrize(
    "stated", [(None, [[0, 0, 0, 0, 1, 1, 1]]), ([[1, 1, 1, 1, 2, 2, 2]],)], ids=["seq_idx", "numbers"]
)
@pytest.mark.parametrize("axes", [1, 3, 4])
def test_ids_may_jump_upwards_inside_a_stated_document(stated, axes):
    ids = JUMPS if axes == 1 else [JUMPS] * axes
    assert recognised(ids, *stated).lengths == (4, 3)
    assert recognised(ids).lengths == (2, 2, 1, 2)


INSIDE, HOLE = (
    "position_ids restart inside what {} calls one document: at row 0, token 2.",
    ("hides tokens inside a document of a packed row (it goes on at row 0, token 4)"),
)
DIFFERENT = "seq_idx and the attention_mask of document numbers begin different"
CONFLICTS = {
    "ids and seq_idx": (([[0, 1, 0, 1, 2]], None, [[0, 0, 0, 1, 1]]), INSIDE.format("seq_idx")),
    "ids and numbers": (
        ([[0, 1, 0, 1, 2]], [[1, 1, 1, 2, 2]]), INSIDE.format("the attention_mask of document numbers"),
    ),
    "an id that stands still": (([[0, 1, 1, 2, 3]], None, [[0, 0, 0, 1, 1]]), INSIDE.format("seq_idx")),
    "a fall to another id than 0": (([[5, 9, 7, 8, 9]], None, [[0, 0, 0, 1, 1]]), INSIDE.format("seq_idx")),
    "in another row": (([[0, 1, 0, 1], [0, 1, 2, 0]], None, [[0, 0, 1, 1], [0, 0, 0, 0]]), "row 1, token 3"),
    "seq_idx and other numbers": ((None, [[1, 1, 2, 2, 3, 3]], [[0, 0, 0, 1, 1, 1]]), DIFFERENT),
    "seq_idx and one number": ((None, [[2, 2, 2, 2, 2, 2]], [[0, 0, 0, 1, 1, 1]]), DIFFERENT),
    "seq_idx and more numbers": ((None, [[1, 1, 2, 3, 3, 3]], [[0, 0, 0, 1, 1, 1]]), DIFFERENT),
    "a hole in ids": (([[0, 1, 0, 9, 1, 2]], [[1, 1, 1, 0, 1, 1]]), HOLE),
    "a hole in numbers": ((None, [[1, 1, 2, 0, 2, 2]]), HOLE),
    "a hole in seq_idx": ((None, [[1, 1, 1, 0, 1, 1]], [[0, 0, 1, 1, 1, 1]]), HOLE),
}  # fmt: skip


@pytest.mark.parametrize(("sources", "message"), CONFLICTS.values(), ids=CONFLICTS)
def test_sources_that_contradict_each_other_and_holes_are_errors(sources, message):
    with pytest.raises(BoundaryConflict) as error:
        recognised(*sources)
    assert message in str(error.value) and isinstance(error.value, ValueError)


@pytest.mark.parametrize("ids", [[0, 1, 2, 3, 4], [0, 1, 0, 0, 2]], ids=["counted", "not counted"])
def test_ids_that_go_on_behind_padding_are_no_jump_in_training(ids):
    assert recognised([ids], [[1, 1, 0, 0, 1]], training=True) is None


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
        find_boundaries((2, 4), CPU, position_ids=ids)
    assert message in str(error.value)


@pytest.mark.parametrize("shape", [(3, 5), (5,), (4, 6), (3, 1, 6), (2, 6), ()], ids=str)
def test_a_seq_idx_of_another_batch_is_refused(shape):
    with pytest.raises(BadCuSeqlens) as error:
        find_boundaries((3, 6), CPU, seq_idx=torch.zeros(shape, dtype=torch.int32))
    assert f"seq_idx: expected [3, 6], found {list(shape)}." in str(error.value)


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
    # For each token, whether it starts a document. Ids may or may not count the padding between two tokens. Other ids
    # after padding are ambiguous and continue the document, unless they restart at 0.
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
    # Whether a token after padding neither continues nor restarts at 0, so that it may not be a filler.
    last, apart = None, 0
    for position, real in zip(row, mask):
        apart += 1
        if real and last is not None and apart > 1 and position not in (0, last + 1, last + apart):
            return True
        if real:
            last, apart = position, 0
    return False


def slow_recognise(rows, masks):
    # Returns the cuts between documents and runs of padding, None if nothing is packed, or an error for a hole.
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
    # The documents of a row are 1, 2, ..., and its padding is 0.
    counted = itertools.accumulate(slow_starts(row, mask))
    return [count if real else 0 for count, real in zip(counted, mask)]


@st.composite
def layouts(draw, padded=False):
    # Rows have 1 to 50 documents each, and are cut to the shortest row's length.
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
    assert fa2patch.boundaries(found.positions_of(shape)).lengths == found.lengths


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


@pytest.mark.parametrize("examples", [300, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("layout", "check"), CHECKS.values(), ids=CHECKS)
def test_any_layout_is_cut_as_a_slow_loop_cuts_it(layout, check, examples):
    settings(max_examples=examples, **DRAWN)(given(layout)(check))()


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
        positions = stated.positions_of((1, 6))
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert positions.tolist() == ids.tolist()


def picture(start, height, width, frames=1):
    # mRoPE ids, [3, tokens], of a picture or of a film's frames.
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
    assert find_boundaries((1, sum(lengths)), ids.device, position_ids=ids).lengths == lengths
    text = torch.cat([torch.arange(length) for length in lengths])[None, None]
    four = torch.cat([text, ids])
    assert fa2patch.boundaries(four).lengths == lengths
    cu = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    from_cu_seqlens(cu, max(lengths), (1, sum(lengths)), position_ids=ids)


def test_one_document_with_a_picture_is_not_packed():
    ids = torch.cat([words(0, 3), picture(3, 2, 4), words(7, 2)], dim=1)[:, None]
    assert find_boundaries((1, ids.shape[-1]), ids.device, position_ids=ids) is None


IDS = st.one_of(
    st.lists(st.integers(1, 6), min_size=1, max_size=8).map(lambda lengths: [i for n in lengths for i in range(n)]),
    st.lists(st.sampled_from([0, 1, 2, 3, 7, 2**62, 2**63 - 1, -(2**63)]), min_size=1, max_size=12),
)


@given(IDS)
def test_documents_are_those_of_one_look_at_each_token(ids):
    half = len(ids) // 2
    for rows in ([ids], [ids[:half], ids[half : 2 * half]]):
        if not rows[0]:
            continue
        tensor = torch.tensor(rows)
        expected = slow_boundaries(rows)
        lengths = [b - a for a, b in zip(expected, expected[1:])]
        found = find.from_positions(tensor, tensor.device, always=True)
        ends, numbers = find._on_device(tensor)
        assert found.cu_seqlens.tolist() == ends[: len(expected)].tolist() == expected
        assert found.lengths == tuple(lengths) and (found.max_seqlen, numbers[1]) == (max(lengths), max(lengths))
        assert numbers[0] == len(lengths) and numbers[2:].tolist() == [min(map(min, rows)), max(map(max, rows))]
        packed = find_boundaries(tensor.shape, tensor.device, position_ids=tensor)
        assert (packed is None) == (len(lengths) == len(rows))
        assert fa2patch.boundaries(tensor).cu_seqlens.tolist() == expected
