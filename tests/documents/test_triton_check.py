"""How the kernel that looks at stated boundaries is called. The kernel: ``tests/stacks/test_triton_check.py``."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fa2patch import errors
from fa2patch.documents import given_boundaries, tensors
from fa2patch.documents.given_boundaries import from_cu_seqlens

CPU = torch.device("cpu")


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.fixture
def asserted(monkeypatch):
    found = []
    monkeypatch.setattr(tensors, "assert_async", lambda held, message: found.append((held, message)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: CPU.index)
    return found


def kernel(monkeypatch, believed=True):
    calls = []
    module = SimpleNamespace(
        believed=lambda index: believed,
        looked_at=lambda *given: calls.append(given) or torch.tensor(1),
    )
    monkeypatch.setattr(given_boundaries, "_kernel", lambda: module)
    return calls


IDS = torch.tensor([[0, 1, 2, 0, 1, 2]])


@pytest.mark.parametrize("with_keys", [True, False])
@pytest.mark.parametrize("with_ids", [True, False])
def test_its_one_assertion_says_what_that_of_the_operators_says(asserted, monkeypatch, with_ids, with_keys):
    calls = kernel(monkeypatch)
    ends, ids = ints(0, 3, 6), IDS if with_ids else None
    keys = ends.clone() if with_keys else None
    assert given_boundaries._checked_by_triton(ends, keys, (1, 6), ids, 3)
    assert len(calls) == len(asserted) == 1
    ends, keys, ids = (None if each is None else each.to("meta") for each in (ends, keys, ids))
    from_cu_seqlens(ends, 3, (1, 6), cu_seqlens_k=keys, position_ids=ids)
    assert asserted[0][1] == asserted[1][1]


@pytest.mark.parametrize("why", ["not believed", "no Triton", "three axes", "another device", "a subclass"])
def test_otherwise_the_operators_look(asserted, monkeypatch, why):
    calls = kernel(monkeypatch, believed=why != "not believed")
    ends, ids = ints(0, 3, 6), IDS
    if why == "no Triton":
        monkeypatch.setattr(given_boundaries, "_kernel", lambda: None)
    elif why == "three axes":
        ids = torch.stack([IDS] * 3)
    elif why == "another device":
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    elif why == "a subclass":
        ends = torch.nn.Parameter(ends, requires_grad=False)
    assert not given_boundaries._checked_by_triton(ends, None, (1, 6), ids, 3)
    assert calls == asserted == []


def test_other_ends_of_keys_are_refused_on_the_host(asserted, monkeypatch):
    kernel(monkeypatch)
    with pytest.raises(errors.BoundaryConflict, match="cu_seq_lens_q and cu_seq_lens_k differ"):
        from_cu_seqlens(ints(0, 3, 6), 3, (1, 6), cu_seqlens_k=ints(0, 6), position_ids=IDS)
