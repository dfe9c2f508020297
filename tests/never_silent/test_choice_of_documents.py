"""Modules that mix some documents only: which documents a proof changes and compares, and when it is repeated."""

from __future__ import annotations

import pytest
import torch
from small_models import alone, assert_right, called, labels_of, llama, patched, refusal, told
from unknown_modules import Around, OneWay, behind_the_mlp, mixed, wrapped_mlp

from compat_matrix.check.rows import documents
from fa2patch import errors


class WithCapacity(torch.nn.Module):
    # The expert computes the first tokens that have a large gate, and no more than its capacity.

    def __init__(self, inner, size, capacity=3):
        super().__init__()
        self.inner, self.capacity = inner, capacity
        self.gate = torch.nn.Linear(size, 1, bias=False)
        torch.nn.init.normal_(self.gate.weight, generator=torch.Generator().manual_seed(1))

    def forward(self, states):
        flat = states.reshape(-1, states.shape[-1])
        on = self.gate(flat)[:, 0] > 0
        kept = on & (on.long().cumsum(0) <= self.capacity)
        return (self.inner(flat) * kept[:, None]).view_as(states)


def with_capacity(model):
    layer = model.model.layers[1]
    layer.mlp = WithCapacity(layer.mlp, model.config.hidden_size)


def drawn(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 50, (length,), generator=generator) for length in lengths]


def shown(state, of, to, hidden):
    # One document's tokens are shown to another one, by their places in the row.
    hidden = hidden.clone()
    hidden[:, to] += 8 * hidden[:, of].mean(1, keepdim=True)
    return hidden


def shows(of, to):
    return lambda inner: Around(inner, lambda self, states: self.inner(shown(self, of, to, states)))


def boundary_only(lengths):
    # Each document's last token is shown to the first of the next.
    ends = torch.tensor(lengths).cumsum(0)[:-1]

    def compute(self, states):
        states = states.clone()
        states[:, ends] = states[:, ends] + 8 * states[:, ends - 1]
        return self.inner(states)

    return lambda inner: Around(inner, compute)


def proven(model, docs, **options):
    # Whether a packed batch is computed.
    try:
        with torch.no_grad():
            model(**told(docs, **options))
    except errors.PackingNotIsolated:
        return False
    return True


@pytest.mark.parametrize("seed", range(20, 26))
@pytest.mark.parametrize("lengths", [(5, 1, 7, 4), (5, 3, 7, 4), (1, 9, 1, 1), (6, 1) * 6])
def test_an_expert_with_a_capacity_is_right_or_refused(lengths, seed):
    model, plain = llama(), llama()
    for each in (model, plain):
        with_capacity(each)
    patched(model)
    docs = drawn(lengths, seed)
    if proven(model, docs):
        with torch.no_grad():
            found, expected = model(**told(docs)).logits[0], torch.cat([plain(doc[None]).logits[0] for doc in docs])
        assert torch.allclose(found, expected, atol=1e-4)


LENGTHS = (3, 4, 2, 5, 1, 3)
STARTS = [0, 3, 7, 9, 14, 15, 18]


@pytest.mark.parametrize("of", range(6))
@pytest.mark.parametrize("to", range(6))
def test_a_module_that_shows_one_document_to_another_is_refused(of, to):
    # Among them is the first document shown to the third: these were changed together.
    if of == to:
        return
    tokens = [slice(start, stop) for start, stop in zip(STARTS, STARTS[1:])]
    model = llama()
    wrapped_mlp(model, shows(tokens[of], tokens[to]))
    patched(model)
    with torch.no_grad(), refusal(r"first in layers\.1\.mlp", errors.PackingNotIsolated):
        model(**told(drawn(LENGTHS)))


@pytest.mark.parametrize("of, to", [(0, 2), (2, 0), (1, 3), (0, 4), (5, 1)])
def test_a_module_that_mixes_gradients_of_two_documents_alone_is_refused(of, to):
    tokens = [slice(start, stop) for start, stop in zip(STARTS, STARTS[1:])]

    class Some(OneWay):
        @staticmethod
        def backward(ctx, gradient):
            return shown(None, tokens[of], tokens[to], gradient)

    model = llama().train()
    wrapped_mlp(model, lambda inner: Around(inner, lambda self, states: Some.apply(self.inner(states))))
    patched(model)
    with refusal("gradient", errors.PackingNotIsolated):
        model(**told(drawn(LENGTHS)))


@pytest.mark.parametrize("lengths", [(1, 4), (1, 1, 1), (4, 1, 1, 5), (2,) * 12])
def test_neighbours_that_are_mixed_at_a_boundary_are_refused(lengths):
    model = llama()
    wrapped_mlp(model, boundary_only(lengths))
    patched(model)
    assert not proven(model, drawn(lengths))


def in_longer_rows(inner):
    return Around(inner, lambda self, states: self.inner(mixed(states) if states.shape[1] > 16 else states))


def of_many_documents(inner):
    # The layer counts the places in which the row begins anew, by the positions that it was given.
    return Around(inner, lambda self, states: self.inner(mixed(states) if self.starts > 4 else states), starts=0)


def test_a_module_that_mixes_longer_rows_is_refused_where_the_first_one_comes():
    model = llama()
    wrapped_mlp(model, in_longer_rows)
    patched(model)
    lengths = [(5, 4), (4, 5), (3, 3), (7, 6), (5, 4), (5, 5)]  # the seventh is no power of two
    assert all(proven(model, drawn(each)) for each in lengths)
    assert not proven(model, drawn((9, 8)))
    assert not proven(model, drawn((9, 8)))


def test_a_module_that_mixes_many_documents_is_refused_where_they_come_first():
    model = llama()
    wrapped_mlp(model, of_many_documents)
    mlp = model.model.layers[1].mlp
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, given, named: setattr(mlp, "starts", int((named["position_ids"] == 0).sum())),
        with_kwargs=True,
    )
    patched(model)
    assert all(proven(model, drawn((6, 6, 6))) for _ in range(6))
    assert not proven(model, drawn((3,) * 6))


def switches_on(number):
    def compute(self, states):
        self.calls += 1
        return self.inner(mixed(states) if self.calls > number else states)

    return lambda inner: Around(inner, compute, calls=0)


@pytest.mark.parametrize("longer", [False, True])
def test_a_module_that_begins_to_mix_is_refused_with_the_next_proof(longer):
    model = llama()
    wrapped_mlp(model, switches_on(12))
    patched(model)
    for _ in range(13 if longer else 15):
        assert proven(model, drawn((5, 4)))
    assert not proven(model, drawn((5, 5) if longer else (5, 4)))


class Carries(torch.nn.Module):
    # It adds the mean of the forward before, so that two runs differ without a leak, and one document to the next.

    def __init__(self, inner, leaks):
        super().__init__()
        self.inner, self.leaks = inner, leaks
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, states):
        output = self.inner(states) * (1 + self.mean)
        with torch.no_grad():
            self.mean.mul_(0.5).add_(states.std())
        if self.leaks:
            output = output + 0.2 * output[:, :1]
        return output


def test_what_is_carried_from_one_forward_to_the_next_hides_no_leak():
    model = llama()
    wrapped_mlp(model, lambda inner: Carries(inner, leaks=True))
    patched(model)
    assert not proven(model, drawn((5, 3, 4)))


def test_what_is_carried_is_as_without_a_proof():
    means = []
    for prove in (False, "unknown"):
        model = llama()
        wrapped_mlp(model, lambda inner: Carries(inner, leaks=False))
        patched(model, prove=prove)
        for _ in range(3):
            model(**told(drawn((5, 3, 4))))
        means.append(model.model.layers[1].mlp.mean.clone())
    assert torch.equal(*means)


@pytest.mark.parametrize("training", [False, True])
def test_what_looks_at_one_token_at_a_time_is_computed_with_many_documents(training):
    model, plain = llama().train(training), llama().train(training)
    for each in (model, plain):
        behind_the_mlp(each, lambda self, states: torch.tanh(states))
    patched(model)
    docs = documents(3, 1, 4, 1, 2, 5, 1, 3, 2, 4)
    for _ in range(2):
        assert_right(called(model, told(docs, labels=labels_of(docs, 7))), alone(plain, docs))
