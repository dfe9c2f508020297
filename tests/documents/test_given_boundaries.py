"""Boundaries that the caller states: lengths, trees of segments, and what each error says, on a CPU and on a device."""

import pytest
import torch

from fa2patch.documents import given_boundaries, tensors
from fa2patch.documents.given_boundaries import from_cu_seqlens
from fa2patch.errors import BadCuSeqlens, BadParents, BadPositionIds, BoundaryConflict


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def taken(cu, longest=None, shape=None, **sources):
    # Lists become tensors of one row, unless a shape is given.
    sources = {name: torch.tensor(ids) if isinstance(ids, list) else ids for name, ids in sources.items()}
    return from_cu_seqlens(ints(*cu) if isinstance(cu, tuple) else cu, longest, shape or (1, cu[-1]), **sources)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("shape", [(4,), (1, 4)], ids=["[n+1]", "[1, n+1]"])
@pytest.mark.parametrize("longest", [3, torch.tensor(3), torch.tensor([1, 3, 2]), None], ids=repr)
def test_stated_boundaries_are_taken(dtype, shape, longest):
    found = from_cu_seqlens(torch.tensor([0, 1, 4, 6], dtype=dtype).view(shape), longest, (1, 6))
    assert found.cu_seqlens.tolist() == [0, 1, 4, 6]
    assert found.cu_seqlens.dtype == torch.int32
    assert type(found.max_seqlen) is int
    assert found.max_seqlen == 3
    assert found.lengths == (1, 3, 2)


def test_a_longest_document_may_be_stated_too_long():
    assert taken((0, 1, 4, 6), 7).max_seqlen == 7


def test_int32_lengths_are_not_copied():
    cu = ints(0, 2, 4)
    assert from_cu_seqlens(cu, 2, (1, 4)).cu_seqlens.data_ptr() == cu.data_ptr()


AGREEING = {
    "documents without tokens": ((0, 0, 2, 2, 5, 5), None, {"position_ids": [[0, 1, 0, 1, 2]]}),
    "several rows": ((0, 4, 6, 8), (2, 4), {"position_ids": [[0, 1, 2, 3], [0, 1, 0, 1]]}),
    "ids that restart": ((0, 3, 6), None, {"position_ids": [[0, 1, 2, 0, 1, 2]]}),
    "ids that go on": ((0, 3, 6), None, {"position_ids": [[0, 1, 2, 3, 4, 5]]}),
    "ids that begin anywhere": ((0, 3, 6), None, {"position_ids": [[7, 8, 9, 2, 3, 4]]}),
    "no padding": ((0, 3, 6), None, {"attention_mask": [[1, 1, 1, 1, 1, 1]]}),
    "padding ends a document": ((0, 3, 6), None, {"attention_mask": [[1, 1, 1, 1, 0, 0]]}),
    "padding ends both": ((0, 3, 6), None, {"attention_mask": [[1, 1, 0, 1, 1, 0]]}),
    "padding between": ((0, 2, 4, 6), None, {"attention_mask": [[1, 1, 0, 0, 1, 1]]}),
    "padding in front": ((0, 2, 6), None, {"attention_mask": [[0, 0, 1, 1, 1, 1]]}),
    "document numbers": ((0, 3, 6), None, {"attention_mask": [[1, 1, 1, 2, 2, 2]]}),
    "a bool mask": ((0, 3, 6), None, {"attention_mask": [[True, True, True, True, True, False]]}),
    "ids at padding say nothing": (
        (0, 3, 6), None, {"position_ids": [[0, 1, 2, 0, 1, 1]], "attention_mask": [[1, 1, 1, 1, 1, 0]]},
    ),
    "keys": ((0, 3, 6), None, {"cu_seqlens_k": [0, 3, 6]}),
    "keys with a batch dimension": ((0, 3, 6), None, {"cu_seqlens_k": [[0, 3, 6]]}),
    "keys in int32": ((0, 3, 6), None, {"cu_seqlens_k": ints(0, 3, 6)}),
}  # fmt: skip


@pytest.mark.parametrize(("cu", "shape", "sources"), AGREEING.values(), ids=AGREEING)
def test_sources_that_agree_with_stated_documents(cu, shape, sources):
    found = taken(cu, None, shape, **sources)
    assert found.lengths == tuple(b - a for a, b in zip(cu, cu[1:]))
    assert found.max_seqlen == max(found.lengths)


def test_keys_may_be_the_same_tensor():
    cu = ints(0, 3, 6)
    assert from_cu_seqlens(cu, 3, (1, 6), cu_seqlens_k=cu).lengths == (3, 3)


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


RESTART = "position_ids restart inside what cu_seq_lens call one document"
DIFFER, LOGITS = "cu_seq_lens_q and cu_seq_lens_k differ", "A mask that is added to logits cannot go with a packed row"
HIDES, RUNS_ON = "hides tokens before real ones of the same document", "runs on into the next row. At the first token"
REFUSED = {
    "a longest document that is too short": ((0, 3, 6), {"longest": 2}, "max_length is 2, but cu_seq_lens hold a long"),
    "the same as a tensor": ((0, 3, 6), {"longest": torch.tensor(2)}, "max_length is 2"),
    "keys that start earlier": ((0, 3, 6), {"cu_seqlens_k": [0, 2, 6]}, DIFFER),
    "keys that start later": ((0, 3, 6), {"cu_seqlens_k": [0, 4, 6]}, DIFFER),
    "fewer keys": ((0, 3, 6), {"cu_seqlens_k": [0, 6]}, DIFFER),
    "more keys": ((0, 3, 6), {"cu_seqlens_k": [0, 3, 3, 6]}, DIFFER),
    "ids that restart, 1-D": ((0, 3, 6), {"position_ids": [0, 1, 0, 1, 2, 3]}, RESTART),
    "ids that restart": ((0, 3, 6), {"position_ids": [[0, 1, 0, 1, 2, 3]]}, RESTART),
    "ids that restart, 3-D": ((0, 3, 6), {"position_ids": [[[0, 1, 0, 1, 2, 3]]]}, RESTART),
    "ids that stand still": ((0, 3, 6), {"position_ids": [[0, 1, 1, 0, 1, 2]]}, RESTART),
    "ids that fall, not to 0": ((0, 3, 6), {"position_ids": [[7, 9, 8, 0, 1, 2]]}, RESTART),
    "three axes that fall": ((0, 3, 6), {"position_ids": [[[7, 9, 8, 0, 1, 2]]] * 3}, RESTART),
    "text below its picture": (
        (0, 3, 6), {"position_ids": [[[0, 1, 5, 0, 1, 2]], [[0, 9, 5, 0, 1, 2]], [[0, 1, 5, 0, 1, 2]]]}, RESTART,
    ),
    "uint8 ids that restart": ((0, 4), {"position_ids": torch.tensor([[254, 255, 0, 1]], dtype=torch.uint8)}, RESTART),
    "one document of two rows": ((0, 8), {"shape": (2, 4)}, RUNS_ON),
    "a document in two rows": ((0, 3, 6, 8), {"shape": (2, 4)}, RUNS_ON),
    "another one": ((0, 5, 8), {"shape": (2, 4)}, "of every row, of 4 tokens, a document"),
    "ids of another batch": ((0, 6), {"position_ids": [[0] * 5]}, "One position id is needed for each token"),
    "floats": ((0, 6), {"position_ids": torch.zeros(1, 6)}, "expected integers"),
    "padding in front": ((0, 3, 6), {"attention_mask": [[0, 0, 1, 1, 1, 1]]}, HIDES),
    "padding inside the first": ((0, 3, 6), {"attention_mask": [[1, 0, 1, 1, 1, 1]]}, HIDES),
    "padding inside the last": ((0, 3, 6), {"attention_mask": [[1, 1, 1, 1, 0, 1]]}, HIDES),
    "numbers that change inside": (
        (0, 4), {"attention_mask": [[1, 1, 2, 2]]}, "document numbers change inside what cu_seq_lens call one document",
    ),
    "a mask of -inf": ((0, 3, 6), {"attention_mask": [[0.0] * 5 + [float("-inf")]]}, LOGITS),
    "a mask of -1e4": ((0, 3, 6), {"attention_mask": [[0.0] * 5 + [-1e4]]}, LOGITS),
}  # fmt: skip
# How the messages of errors begin that are not BoundaryConflict.
ERRORS = {"max_length": BadCuSeqlens, "runs on": BadCuSeqlens, "of every": BadCuSeqlens, "One": BadPositionIds,
          "expected": BadPositionIds}  # fmt: skip


@pytest.mark.parametrize(("cu", "given", "message"), REFUSED.values(), ids=REFUSED)
def test_what_contradicts_stated_documents_is_refused(cu, given, message):
    expected = next((error for begin, error in ERRORS.items() if message.startswith(begin)), BoundaryConflict)
    with pytest.raises(expected) as error:
        taken(cu, **given)
    assert message in str(error.value)


@pytest.mark.parametrize("mask", [None, [[1] * 7]], ids=["no mask", "mask"])
@pytest.mark.parametrize("axes", [1, 3, 4])
def test_ids_may_jump_upwards_inside_a_stated_document(axes, mask):
    ids = [[0, 1, 52, 53, 0, 7, 8]]
    taken((0, 4, 7), position_ids=ids if axes == 1 else [ids] * axes, attention_mask=mask)


def test_with_an_int_nothing_is_read_from_a_device(monkeypatch):
    # A meta tensor holds no values, so any read fails.
    monkeypatch.setattr(tensors, "read", lambda tensor: pytest.fail("read"))
    cu = ints(0, 3, 6).to("meta")
    ids = torch.zeros(1, 6, dtype=torch.long, device="meta")
    mask = torch.ones(1, 6, device="meta")
    found = from_cu_seqlens(cu, 3, (1, 6), cu_seqlens_k=cu.clone(), position_ids=ids, attention_mask=mask)
    assert found.max_seqlen == 3
    assert found.positions_of((1, 6)).shape == (1, 6)


# trees of segments

ENDS = torch.tensor([0, 4, 6, 9, 10], dtype=torch.int32)
PARENTS = [-1, 0, 0, 2]
IDS = torch.tensor([[0, 1, 2, 3, 4, 5, 4, 5, 6, 7]])


def tree(ends=ENDS, parents=PARENTS, ids=IDS, shape=(1, 10), mask=None):
    parents = torch.tensor(parents) if isinstance(parents, list) else parents
    return from_cu_seqlens(ends, None, shape, position_ids=ids, attention_mask=mask, parents=parents)


def test_a_tree_is_kept_with_the_boundaries():
    found = tree()
    assert found.parents.dtype == torch.int32 and found.parents.tolist() == PARENTS
    assert found.tree.leaves == [1, 3] and found.tree.path(3) == (0, 2, 3)
    assert found.lengths == (4, 2, 3, 1) and found.max_seqlen == 4
    assert torch.equal(found.positions_of((1, 10)), IDS)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16], ids=str)
def test_other_integers_and_a_batch_dimension_are_accepted(dtype):
    assert tree(parents=torch.tensor([PARENTS], dtype=dtype)).parents.tolist() == PARENTS


def test_ids_may_start_anywhere_and_may_be_left_out():
    assert tree(ids=IDS + 5).parents.tolist() == PARENTS
    assert tree(ids=None).parents.tolist() == PARENTS


def test_two_rows_have_trees_of_their_own():
    ends = torch.tensor([0, 2, 3, 4, 6, 8], dtype=torch.int32)
    ids = torch.tensor([[0, 1, 2, 2], [0, 1, 2, 3]])
    assert tree(ends, [-1, 0, 0, -1, 3], ids, (2, 4)).tree.leaves == [1, 2, 4]


def test_ids_on_three_axes_go_on_behind_a_picture():
    # The parent ends in a picture of 2 x 2 tokens: the text behind it has its largest number plus one.
    time, height, width = [0, 1, 1, 1, 1, 3, 4, 3], [0, 1, 1, 2, 2, 3, 4, 3], [0, 1, 2, 1, 2, 3, 4, 3]
    ids = torch.tensor([[time], [height], [width]])
    ends = torch.tensor([0, 5, 7, 8], dtype=torch.int32)
    assert tree(ends, [-1, 0, 0], ids, (1, 8)).parents.tolist() == [-1, 0, 0]
    wrong = ids.clone()
    wrong[:, 0, 7] = 9
    with pytest.raises(BadParents, match="do not go on"):
        tree(ends, [-1, 0, 0], wrong, (1, 8))


@pytest.mark.parametrize(
    "parents",
    [[-1, 0, 0, 3], [-1, 0, 3, 0], [1, -1, -1, -1], [-1, 0, 0, -2], [-1, 2, 1, 0]],
    ids=["itself", "later", "the first", "below -1", "a circle"],
)
def test_a_parent_must_come_earlier(parents):
    with pytest.raises(BadParents, match="the number of an earlier one, or -1"):
        tree(parents=parents)


@pytest.mark.parametrize(
    ("parents", "found"),
    [
        ([-1, 0, 0], r"found torch.int64 \[3\]"),
        (torch.tensor([-1.0, 0, 0, 2]), r"found torch.float32 \[4\]"),
        (torch.tensor(-1), r"found torch.int64 \[\]"),
        ("none", "found str"),
    ],
    ids=["too few", "floats", "one number", "no tensor"],
)
def test_one_integer_for_each_segment(parents, found):
    with pytest.raises(BadParents, match=f"for each of the 4 segments of cu_seq_lens, {found}"):
        tree(parents=parents)


@pytest.mark.parametrize(
    ("ends", "ids", "shape"),
    [
        (torch.tensor([0, 0, 6, 9, 10]), None, (1, 10)),
        (torch.tensor([0, 4, 4, 9, 10]), None, (1, 10)),
        (torch.tensor([0, 4, 5, 9, 10]), None, (2, 5)),
    ],
    ids=["an empty parent", "an empty branch", "another row"],
)
def test_segments_with_a_parent_have_tokens_and_are_in_its_row(ends, ids, shape):
    with pytest.raises(BadParents, match="must have tokens and be in one row"):
        tree(ends.int(), PARENTS, ids, shape)


@pytest.mark.parametrize(("start", "stop"), [(4, 6), (6, 9), (9, 10)])
@pytest.mark.parametrize("first", [0, 9])
def test_ids_go_on_from_the_parent(start, stop, first):
    ids = IDS.clone()
    ids[0, start:stop] = torch.arange(first, first + stop - start)
    with pytest.raises(BadParents, match="do not go on from its parent's last one"):
        tree(ids=ids)


def test_a_mask_may_hide_nothing():
    assert tree(mask=torch.ones(1, 10)).tree is not None
    mask = torch.ones(1, 10, dtype=torch.int64)
    mask[0, 3] = 0
    with pytest.raises((BadParents, BoundaryConflict)):
        tree(mask=mask)
    mask = torch.ones(1, 10, dtype=torch.int64)
    mask[0, 9] = 0
    with pytest.raises(BadParents, match="that is not all ones"):
        tree(mask=mask)


def test_boundaries_on_another_device_keep_nothing_that_was_made_for_the_first():
    # A block mask of FlexAttention, or a tree's tensors, are on the device that they were made for.
    found = tree()
    found.made["flex"] = torch.zeros(1)
    assert found.tree is not None
    moved = found.to(torch.device("meta"))
    assert moved.made == {} and moved.parents.device.type == moved.cu_seqlens.device.type == "meta"
    assert set(found.made) > {"flex"}


# on a device


@pytest.fixture
def asserted(monkeypatch):
    found = []

    def assert_async(held, message):
        assert len(message) < 255, "torch: Message length must be smaller than 255"
        found.append((held.device.type, message))

    monkeypatch.setattr(tensors, "assert_async", assert_async)
    return found


def test_on_a_device_the_conditions_of_a_collators_batch_become_one_assertion_there(asserted):
    tokens = 10**7
    cu, ids = ints(0, 3, tokens).to("meta"), torch.zeros(1, tokens, dtype=torch.long, device="meta")
    from_cu_seqlens(cu, tokens, (1, tokens), cu_seqlens_k=cu, position_ids=ids)
    ((where, message),) = asserted
    assert where == "meta"
    for part in ("must rise from 0", "max_length is 10000000", "into the next", "restart inside"):
        assert part in message


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"attention_mask": torch.ones(1, 6, device="meta")}, "... The same batch on a CPU says all."),
        ({"cu_seqlens_k": ints(0, 3, 6).to("meta")}, "cu_seq_lens_q and cu_seq_lens_k differ"),
        ({"parents": ints(-1, -1).to("meta")}, "into the next"),
    ],
    ids=["mask", "keys", "tree"],
)
def test_on_a_device_a_long_message_is_cut_and_says_where_the_rest_is(asserted, more, said):
    ids = torch.zeros(1, 6, dtype=torch.long, device="meta")
    from_cu_seqlens(ints(0, 3, 6).to("meta"), 3, (1, 6), position_ids=ids, **more)
    assert all(message.startswith("cu_seq_lens must rise") for _, message in asserted[:1])
    assert said in asserted[0][1] and {where for where, _ in asserted} == {"meta"}


def test_a_message_that_no_device_takes_is_cut():
    words = "word " * 100
    assert len(tensors.fitting([words])) == tensors.LONGEST
    assert tensors.fitting([words]).endswith("The same batch on a CPU says all.")
    assert tensors.fitting(["Short. And more.", "Short. And more."]) == "Short. And more."
    assert tensors.fitting(["One. " + words, "Two."]) == "One. Or: Two."


def test_on_a_device_a_longest_document_that_is_too_short_is_asserted(asserted):
    from_cu_seqlens(ints(0, 3, 6).to("meta"), 2, (1, 6))
    assert any("max_length is 2" in message for _, message in asserted)


def test_on_a_device_every_condition_is_part_of_the_assertion(monkeypatch):
    checks = []
    monkeypatch.setattr(given_boundaries, "require_all", checks.extend)
    cu, like = ints(0, 3, 6).to("meta"), {"dtype": torch.long, "device": "meta"}
    given = {"position_ids": torch.zeros(1, 6, **like), "attention_mask": torch.ones(1, 6, **like)}
    from_cu_seqlens(cu, 3, (1, 6), cu_seqlens_k=cu.clone(), **given)
    assert {check.held.device.type for check in checks} == {"meta"}
    messages = " ".join(check.message for check in checks)
    for part in ("must rise from 0", "differ", "into the next", "numbers change", "hides tokens", "restart inside"):
        assert part in messages


@pytest.mark.parametrize("ends", [(0, 3, 2, 6), (0, 5, 1, 6), (1, 3, 6), (0, 3, 5)])
def test_in_a_graph_ends_that_fall_or_do_not_fit_fail_the_assertion(monkeypatch, ends):
    failed = []
    for module in (given_boundaries, tensors):
        monkeypatch.setattr(module, "compiling", lambda: True)
    monkeypatch.setattr(tensors, "assert_async", lambda held, message: failed.append(message) if not held else None)
    from_cu_seqlens(ints(0, 3, 6), 3, (1, 6))
    assert failed == []
    from_cu_seqlens(ints(*ends), 6, (1, 6))
    assert any("must rise from 0" in message for message in failed)
