"""Documents from position ids alone: on the host, on a device and in a graph, the same as looking at each token."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fa2patch.documents import device, find
from fa2patch.documents.find import boundaries, recognise

IDS = st.one_of(
    st.lists(st.integers(1, 6), min_size=1, max_size=8).map(lambda lengths: [i for n in lengths for i in range(n)]),
    st.lists(st.sampled_from([0, 1, 2, 3, 7, 2**62, 2**63 - 1, -(2**63)]), min_size=1, max_size=12),
)


def by_hand(rows):
    """Return the ends of the documents of some rows, laid end to end."""
    ends, at = [0], 0
    for row in rows:
        for left, right in zip(row, row[1:]):
            at += 1
            if right != left + 1:
                ends.append(at)
        at += 1
        ends.append(at)
    return ends


@given(IDS)
def test_documents_are_those_of_one_look_at_each_token(ids):
    half = len(ids) // 2
    for rows in ([ids], [ids[:half], ids[half : 2 * half]]):
        if not rows[0]:
            continue
        tensor = torch.tensor(rows)
        expected = by_hand(rows)
        lengths = [b - a for a, b in zip(expected, expected[1:])]
        found = find.from_positions(tensor, tensor.device, always=True)
        ends, numbers = find._on_device(tensor)
        assert found.cu_seqlens.tolist() == ends[: len(expected)].tolist() == expected
        assert found.lengths == tuple(lengths) and (found.max_seqlen, numbers[1]) == (max(lengths), max(lengths))
        assert numbers[0] == len(lengths) and numbers[2:].tolist() == [min(map(min, rows)), max(map(max, rows))]
        packed = recognise(tensor.shape, tensor.device, position_ids=tensor)
        assert (packed is None) == (len(lengths) == len(rows))
        assert boundaries(tensor).cu_seqlens.tolist() == expected


def test_another_device_is_read_once_and_four_numbers_are_read(monkeypatch):
    """The meta device has no values; they are put in where the host reads them."""
    read = []

    def reading(tensor):
        read.append(tuple(tensor.shape))
        return torch.tensor([3, 5, 0, 4]).numpy()

    monkeypatch.setattr(device, "read", reading)
    found = find.from_positions(torch.empty(1, 12, dtype=torch.int64, device="meta"), torch.device("meta"), False)
    assert read == [(4,)]
    assert (len(found), found.max_seqlen, found.positions) == (3, 5, 5)
    assert find.from_positions(torch.empty(3, 4, dtype=torch.int64, device="meta"), torch.device("meta"), False) is None


@pytest.mark.skipif(find.in_graph is None, reason=f"torch {torch.__version__} has no custom_op")
def test_torch_accepts_the_operator():
    ids = torch.tensor([[0, 1, 0, 1, 2, 0]])
    torch.library.opcheck(torch.ops.fa2patch.documents.default, (ids,), test_utils=("test_schema", "test_faketensor"))
