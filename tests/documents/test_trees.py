"""The checks of ``segment_parents``: what is accepted, and what each error says."""

import pytest
import torch

from fa2patch.documents.stated import from_cu_seqlens
from fa2patch.errors import BadParents, BoundaryConflict

ENDS = torch.tensor([0, 4, 6, 9, 10], dtype=torch.int32)
PARENTS = [-1, 0, 0, 2]
IDS = torch.tensor([[0, 1, 2, 3, 4, 5, 4, 5, 6, 7]])


def stated(ends=ENDS, parents=PARENTS, ids=IDS, shape=(1, 10), mask=None):
    parents = torch.tensor(parents) if isinstance(parents, list) else parents
    return from_cu_seqlens(ends, None, shape, position_ids=ids, attention_mask=mask, parents=parents)


def test_a_tree_is_kept_with_the_boundaries():
    found = stated()
    assert found.parents.dtype == torch.int32 and found.parents.tolist() == PARENTS
    assert found.tree.leaves == [1, 3] and found.tree.path(3) == (0, 2, 3)
    assert found.lengths == (4, 2, 3, 1) and found.max_seqlen == 4
    assert torch.equal(found.positions_of((1, 10)), IDS)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16], ids=str)
def test_other_integers_and_a_batch_dimension_are_accepted(dtype):
    assert stated(parents=torch.tensor([PARENTS], dtype=dtype)).parents.tolist() == PARENTS


def test_ids_may_start_anywhere_and_may_be_left_out():
    assert stated(ids=IDS + 5).parents.tolist() == PARENTS
    assert stated(ids=None).parents.tolist() == PARENTS


def test_two_rows_have_trees_of_their_own():
    ends = torch.tensor([0, 2, 3, 4, 6, 8], dtype=torch.int32)
    ids = torch.tensor([[0, 1, 2, 2], [0, 1, 2, 3]])
    assert stated(ends, [-1, 0, 0, -1, 3], ids, (2, 4)).tree.leaves == [1, 2, 4]


def test_ids_on_three_axes_go_on_behind_a_picture():
    """The parent ends in a picture of 2 x 2 tokens: the text behind it has its largest number plus one."""
    time, height, width = [0, 1, 1, 1, 1, 3, 4, 3], [0, 1, 1, 2, 2, 3, 4, 3], [0, 1, 2, 1, 2, 3, 4, 3]
    ids = torch.tensor([[time], [height], [width]])
    ends = torch.tensor([0, 5, 7, 8], dtype=torch.int32)
    assert stated(ends, [-1, 0, 0], ids, (1, 8)).parents.tolist() == [-1, 0, 0]
    wrong = ids.clone()
    wrong[:, 0, 7] = 9
    with pytest.raises(BadParents, match="do not go on"):
        stated(ends, [-1, 0, 0], wrong, (1, 8))


@pytest.mark.parametrize(
    "parents",
    [[-1, 0, 0, 3], [-1, 0, 3, 0], [1, -1, -1, -1], [-1, 0, 0, -2], [-1, 2, 1, 0]],
    ids=["itself", "later", "the first", "below -1", "a circle"],
)
def test_a_parent_must_come_earlier(parents):
    with pytest.raises(BadParents, match="the number of an earlier one, or -1"):
        stated(parents=parents)


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
        stated(parents=parents)


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
        stated(ends.int(), PARENTS, ids, shape)


@pytest.mark.parametrize(("start", "stop"), [(4, 6), (6, 9), (9, 10)])
@pytest.mark.parametrize("first", [0, 9])
def test_ids_go_on_from_the_parent(start, stop, first):
    ids = IDS.clone()
    ids[0, start:stop] = torch.arange(first, first + stop - start)
    with pytest.raises(BadParents, match="do not go on from its parent's last one"):
        stated(ids=ids)


def test_a_mask_may_hide_nothing():
    assert stated(mask=torch.ones(1, 10)).tree is not None
    mask = torch.ones(1, 10, dtype=torch.int64)
    mask[0, 3] = 0
    with pytest.raises((BadParents, BoundaryConflict)):
        stated(mask=mask)
    mask = torch.ones(1, 10, dtype=torch.int64)
    mask[0, 9] = 0
    with pytest.raises(BadParents, match="that is not all ones"):
        stated(mask=mask)


def test_boundaries_on_another_device_keep_nothing_that_was_made_for_the_first():
    """A block mask of FlexAttention, or a tree's tensors, are on the device that they were made for."""
    found = stated()
    found.made["flex"] = torch.zeros(1)
    assert found.tree is not None
    moved = found.to(torch.device("meta"))
    assert moved.made == {} and moved.parents.device.type == moved.cu_seqlens.device.type == "meta"
    assert set(found.made) > {"flex"}
