"""Short documents share calls of the plain formula: which do, that it stays exact, and that nothing leaks."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compat_matrix.check.kernel_cases import HEADS, documents, states
from fa2patch.kernels import Options, grouping
from fa2patch.kernels.reference import Reference

WIDTH = 512
MIXED = (3, 40, 7, 1, 40, 38, 3, 2, 7, 41)
SPECIALS = {
    "plain": {},
    "both ways": {"causal": False},
    "both ways, window": {"causal": False, "window": 2},
    "window": {"window": 2},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 4.0])},
}


def cost(groups, causal):
    """Return what these calls cost by the numbers of the module."""
    masks = 0 if causal else grouping.MASK * sum(group.lengths is not None for group in groups)
    lengths = np.repeat([group.length for group in groups], [group.documents for group in groups])
    return len(groups) + masks + WIDTH * (grouping.TOKEN * lengths + grouping.SCORE * lengths**2.0).sum()


@given(st.lists(st.integers(0, 700), min_size=1, max_size=60).filter(any), st.booleans())
def test_every_token_is_computed_with_its_own_document_and_at_no_higher_cost(lengths, causal):
    plan = grouping.plan(tuple(lengths), WIDTH, causal)
    real = [length for length in lengths if length]
    of_token = np.repeat(np.arange(len(real)), real)
    order = np.arange(sum(real)) if plan.order is None else plan.order
    places = np.arange(sum(real)) if plan.places is None else plan.places
    assert (order[places] == np.arange(sum(real))).all()
    at = 0
    for count, length, own in plan.groups:
        of_call = order[at : at + count * length].reshape(count, length)
        assert (of_token[of_call] == of_token[of_call[:, :1]]).all()
        own = np.full(count, length) if own is None else own
        assert (np.diff(of_call) == (np.arange(1, length) < own[:, None])).all()  # then its last token, repeated
        assert count == 1 or count * length**2 <= grouping.SCORES_AT_ONCE
        at += count * length
    assert at == len(order)
    alone = [grouping.Group(1, length, None) for length in real]
    assert cost(plan.groups, causal) <= cost(alone, causal)


def test_a_long_document_makes_short_ones_no_longer():
    plan = grouping.plan((2048, *(4,) * 300, 2000), WIDTH, True)
    assert plan.groups == ((1, 2048, None), (300, 4, None), (1, 2000, None)) and plan.order is None


@pytest.mark.parametrize(
    "lengths, calls", [((1,) * 400, 1), ((5,) * 100, 1), ((5, 4, 3) * 60, 3), (tuple(range(1, 17)) * 8, 16)]
)
def test_many_short_documents_take_few_calls(monkeypatch, lengths, calls):
    attend, counted = torch.nn.functional.scaled_dot_product_attention, []

    def counting(*args, **kwargs):
        counted.append(args)
        return attend(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counting)
    q, k, v = states(tuple(lengths), dtype=torch.float32, dim=WIDTH // HEADS)
    Reference()(q, k, v, documents(tuple(lengths)), Options())
    assert 1 <= len(counted) <= calls


@pytest.mark.parametrize("special", SPECIALS.values(), ids=SPECIALS)
@pytest.mark.parametrize("broken", [1, 3, 8])
def test_numbers_that_overflow_stay_in_their_document(special, broken):
    """Copies of a document's last token stand beside other documents, and 0 * inf is no number."""
    q, k, v = states(MIXED, dtype=torch.float32)
    assert grouping.plan(MIXED, q.shape[1] * q.shape[2], special.get("causal", True)).order is not None
    with torch.no_grad():
        for tensor in (q, k, v):
            tensor.split(MIXED)[broken].fill_(float("inf"))
    outputs = Reference()(q, k, v, documents(MIXED), Options(**special)).split(MIXED)
    whole = [output for document, output in enumerate(outputs) if document != broken]
    assert all(output.isfinite().all() for output in whole) and not outputs[broken].isfinite().all()
    gradients = torch.autograd.grad(torch.cat(outputs).square().sum(), [q, k, v])
    for gradient, document in itertools.product(gradients, range(len(MIXED))):
        assert document == broken or gradient.split(MIXED)[document].isfinite().all()


@pytest.mark.parametrize("special", SPECIALS.values(), ids=SPECIALS)
def test_second_derivatives_are_those_of_the_documents_alone(special):
    q, k, v = states((2, 5, 3), dtype=torch.float64, heads=HEADS)

    def second(computed):
        first = torch.autograd.grad(computed.square().sum(), [q, k, v], create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in first), [q, k, v])

    special = {"softcap": 3.0, **special}  # torch's flash attention has no second derivative
    grouped = Reference()(q, k, v, documents((2, 5, 3)), Options(**special))
    parts = zip(*(tensor.split((2, 5, 3)) for tensor in (q, k, v)))
    alone = torch.cat([Reference()(*part, documents((len(part[0]),)), Options(**special)) for part in parts])
    for found, expected in zip(second(grouped), second(alone)):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
