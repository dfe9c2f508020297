"""Short documents share calls of the plain formula: which do, that it stays exact, and that nothing leaks."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compat_matrix.bench.operators import counted
from compat_matrix.check.kernel_cases import HEADS, documents, states
from compat_matrix.check.reads import calls
from fa2patch.kernels import Options, grouping, reference
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


ROWS = [
    (6,) * 8, (5, 9, 1, 3, 7), (6, 2) * 4, (150, *(2, 3, 1) * 7), (1,) * 6, (200, 90, 3), (8192, *range(20, 50)) * 3,
    tuple(range(1, 400, 3)),
]  # fmt: skip
TOKENS, SCORES = (16384, 1), (grouping.SCORES, 2)


# Which documents share a call


def assert_bounded(lengths, batches, most, power, pads):
    assert sorted(at for batch in batches for at in batch) == [*range(len(lengths))]
    for batch in batches:
        real, longest = sum(lengths[at] for at in batch), lengths[batch[0]]
        assert longest == max(lengths[at] for at in batch)
        assert longest * len(batch) - real <= (grouping.A_CALL + grouping.SHARE * real if pads else 0)
        assert len(batch) == 1 or len(batch) * longest**power <= most


@pytest.mark.parametrize("pads", [True, False])
@pytest.mark.parametrize("size", [TOKENS, SCORES], ids=["tokens", "scores"])
def test_every_document_is_in_one_batch_and_padding_is_bounded(size, pads):
    for lengths in ROWS:
        assert_bounded(lengths, grouping.batches(lengths, *size, pads), *size, pads)


@pytest.mark.parametrize(
    ("lengths", "calls"),
    [((16,) * 64, 1), ((4,) * 256, 1), ((64, 60) * 8, 1), ((8192, *(20,) * 200), 2), ((256, 100), 2), ((8192,) * 4, 2)],
)
def test_documents_of_near_length_share_a_call(lengths, calls):
    assert len(grouping.batches(lengths, *TOKENS)) == calls


def test_batches_follow_from_lengths_alone():
    # A recomputed forward must make the same batches.
    grouping.batches.cache_clear()
    assert grouping.batches((3, 5, 3, 5), *TOKENS) == [[1, 3, 0, 2]]


@given(st.lists(st.integers(0, 700), min_size=1, max_size=60).filter(any), st.booleans())
def test_attention_moves_tokens_only_where_that_saves_calls(lengths, causal):
    made, last = grouping.shared_calls(documents(tuple(lengths)), WIDTH, causal)
    assert made.lengths == tuple(length for length in lengths if length)
    assert_bounded(made.lengths, made.batches, *SCORES, True)
    alone, masks = len(made.lengths), sum(mask is not None for mask in last)
    assert masks == (0 if causal else sum(len({made.lengths[at] for at in batch}) > 1 for batch in made.batches))
    moved = 0 if made.places is None else 2 + sum(lengths) * WIDTH / grouping.MOVED
    assert len(made.shapes) + masks + moved <= alone
    numbers = torch.arange(sum(lengths))
    pieces = made.split(numbers + 1)
    assert [piece.shape for piece in pieces] == made.shapes
    assert torch.equal(made.join(pieces), numbers + 1)
    of_token = torch.repeat_interleave(torch.tensor(lengths))
    for batch, piece in zip(made.batches, pieces):
        for at, row in zip(batch, piece):  # a document's tokens, and zeros behind them
            assert (row != 0).sum() == made.lengths[at] and row[: made.lengths[at]].all()
            assert len(of_token[row[: made.lengths[at]] - 1].unique()) == 1


def test_a_long_document_makes_short_ones_no_longer():
    made, _ = grouping.shared_calls(documents((2048, *(4,) * 300, 2000)), WIDTH, True)
    assert made.shapes == [(1, 2048), (300, 4), (1, 2000)] and made.places is None


@pytest.mark.parametrize(
    "lengths, calls", [((1,) * 400, 0), ((5,) * 100, 1), ((5, 4, 3) * 60, 3), (tuple(range(1, 17)) * 8, 16)]
)
def test_many_short_documents_take_few_calls(monkeypatch, lengths, calls):
    attend, counted = reference.SDPA, []

    def counting(*args, **kwargs):
        counted.append(args)
        return attend(*args, **kwargs)

    monkeypatch.setattr(reference, "SDPA", counting)
    q, k, v = states(tuple(lengths), dtype=torch.float32, dim=WIDTH // HEADS)
    Reference()(q, k, v, documents(tuple(lengths)), Options())
    assert min(1, calls) <= len(counted) <= calls


def test_equal_documents_need_no_python_for_each():
    # There can be as many documents of one token as tokens.

    def found(count):
        grouping.batches.cache_clear()
        return calls(lambda: grouping.shared_calls(documents((1,) * count), WIDTH, True)).total()

    assert found(2000) == found(20)


@pytest.mark.parametrize("lengths", [(64,), (8,) * 8], ids=["one document", "equal documents"])
def test_documents_that_share_one_call_start_no_operators_beside_it(lengths):
    # Nor does their backward: a split of one piece, or an index, would copy in it.
    q, k, v = states(lengths, dtype=torch.float32)

    def by_hand():
        batched = [x.view(len(lengths), lengths[0], *x.shape[1:]).transpose(1, 2) for x in (q, k, v)]
        return attention(*batched, is_causal=True).transpose(1, 2).flatten(0, 1)

    def started(compute):
        with counted() as found:
            torch.autograd.grad(compute().sum(), (q, k, v))
        return sum(found.values())

    attention = torch.nn.functional.scaled_dot_product_attention
    shared = documents(lengths)
    assert started(lambda: Reference()(q, k, v, shared, Options())) == started(by_hand)


@pytest.mark.parametrize("groups", [1, 2, HEADS], ids=["MHA", "GQA", "MQA"])
def test_documents_of_one_token_are_their_values(groups):
    # Softcap asks for the formula, which gives the same, gradients too: queries and keys have zeros, and not None.
    given = states((1,) * 6, dtype=torch.float64, groups=groups, value_dim=3)
    found, formula = (Reference()(*given, documents((1,) * 6), Options(softcap=softcap)) for softcap in (None, 1e6))
    torch.testing.assert_close(found, formula)
    gradients = (torch.autograd.grad(output.square().sum(), given) for output in (found, formula))
    for gradient, expected in zip(*gradients):
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("special", SPECIALS.values(), ids=SPECIALS)
@pytest.mark.parametrize("broken", [1, 3, 8])
def test_numbers_that_overflow_stay_in_their_document(special, broken):
    # Padding stands beside other documents, and 0 * inf is no number.
    q, k, v = states(MIXED, dtype=torch.float32)
    made, _ = grouping.shared_calls(documents(MIXED), q.shape[1] * q.shape[2], special.get("causal", True))
    assert made.places is not None
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
