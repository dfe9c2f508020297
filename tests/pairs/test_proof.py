"""What is not known in an encoder-decoder is proven with its first packed batch, and ``verify`` sees planted faults."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pairs import FAMILIES, SPOKEN, built, pairs

import fa2patch
from fa2patch.errors import BadBatch, PackingNotIsolated
from fa2patch.upstream import cross, seams
from fa2patch.upstream import pairs as forward
from fa2patch.upstream.seams.bias import of_longest
from fa2patch.upstream.transformers_names import ENCODED_MASK


class Mixes(torch.nn.Module):
    """Code of a user's own around a projection."""

    WAYS = {
        "nothing": lambda states: states,
        "the mean of the row": lambda states: states + 0.01 * states.mean(1, keepdim=True),
        "the neighbour": lambda states: states + 0.01 * states.roll(1, 1),
        "the length of the row": lambda states: states * (1 + 0.001 * states.shape[1]),
    }

    def __init__(self, inner, way):
        super().__init__()
        self.inner, self.way = inner, way

    def forward(self, states):
        return self.WAYS[self.way](self.inner(states))


def with_code_of_a_user(family, stack, way):
    model = built(family)
    inside = model.get_encoder() if stack == "encoder" else model.get_decoder()
    holder, name = (inside.block[0].layer[-1].DenseReluDense, "wi") if family == "t5" else (inside.layers[0], "fc1")
    setattr(holder, name, Mixes(getattr(holder, name), way))
    return model


@pytest.mark.parametrize("way", Mixes.WAYS)
@pytest.mark.parametrize("stack", ["encoder", "decoder"])
@pytest.mark.parametrize("family", ["t5", "bart"])
@pytest.mark.parametrize("training", [False, True])
def test_code_of_a_user_is_proven_in_each_stack(family, stack, way, training):
    model = with_code_of_a_user(family, stack, way).train(training)
    fa2patch.apply(model)
    if way == "nothing":
        model(**pairs(family).packed())
        return
    with pytest.raises(PackingNotIsolated, match="holds what fa2patch does not know, .*Mixes"):
        model(**pairs(family).packed())


@pytest.mark.parametrize("family", [pytest.param("t5", marks=pytest.mark.slow), "bart"])
def test_a_graph_of_unknown_code_wants_a_packed_batch_before(family):
    model = with_code_of_a_user(family, "decoder", "nothing")
    fa2patch.apply(model)
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(PackingNotIsolated, match="one packed batch before torch.compile"):
        compiled(**pairs(family).packed())
    expected = model(**pairs(family).packed()).loss
    torch.compiler.reset()
    assert compiled(**pairs(family).packed()).loss.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_verify_says_that_pairs_are_isolated(family):
    model = built(family)
    fa2patch.apply(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = fa2patch.verify(model, batch=pairs(family).packed() if family in SPOKEN else None)
    assert found.ok and len(found.documents) == (5 if family in SPOKEN else 4)
    assert all(each.moved == each.gradient == 0 and each.distance < 1e-4 for each in found.documents)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model.training and all(weight.grad is None for weight in model.parameters())


def test_verify_of_some_pairs_and_of_a_batch_without_any():
    model = built("bart")
    fa2patch.apply(model)
    found = fa2patch.verify(model, batch=pairs("bart").packed(), max_documents=2)
    assert [each.gradient is None for each in found.documents] == [False, True, True, True, False]
    with pytest.raises(BadBatch, match="expected packed pairs"):
        fa2patch.verify(model, batch=pairs("bart").padded(1))
    fa2patch.revert(model)
    with pytest.raises(PackingNotIsolated, match="is not patched"):
        fa2patch.verify(model)


def changed_sources(change):
    before = cross.before

    def faulty(step):
        before(step)
        mask = step.call.get(ENCODED_MASK)
        if isinstance(mask, forward.PackedMask) and mask.boundaries.sources is not None:
            sources = change(mask.boundaries.sources)
            step.call[ENCODED_MASK] = replace(mask, boundaries=replace(mask.boundaries, sources=sources, made={}))

    return faulty


def shifted_ends(sources):
    ends = sources.cu_seqlens.clone()
    ends[1:-1] += 1
    return replace(sources, cu_seqlens=ends, _lengths=None, made={})


def source_before(sources):
    # source i - 1 for target i: all lengths are moved by one, so that the documents are others
    lengths = [*sources.lengths[1:], sources.lengths[0]]
    ends = torch.tensor([0, *lengths]).cumsum(0).to(sources.cu_seqlens)
    return replace(sources, cu_seqlens=ends, _lengths=tuple(lengths), made={})


@pytest.mark.parametrize("change", [shifted_ends, source_before])
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_verify_sees_sources_that_are_off(family, change, monkeypatch):
    model = built(family)
    fa2patch.apply(model)
    monkeypatch.setattr(cross, "before", changed_sources(change))
    assert not fa2patch.verify(model, strict=False).ok


@pytest.mark.parametrize("family", ["t5", "bart", "mbart"])
def test_verify_sees_labels_that_are_shifted_over_the_row(family, monkeypatch):
    model = built(family)
    fa2patch.apply(model)
    monkeypatch.setattr(
        forward, "_shifted", lambda model, labels, *more: model.prepare_decoder_input_ids_from_labels(labels=labels)
    )
    assert not fa2patch.verify(model, strict=False).ok


@pytest.mark.parametrize("family", ["t5", "umt5"])
def test_verify_sees_a_bias_over_the_row(family, monkeypatch):
    model = built(family)
    fa2patch.apply(model)

    def over_the_row(layer, mask):
        own = of_longest(layer, mask)
        beyond = mask.shape[1] - mask.boundaries.max_seqlen  # 0 for a pair alone

        def compute(self, *lengths, **more):
            bias = own["compute_bias"](self)
            longest = bias.shape[-1]
            return bias if longest == 1 else layer.compute_bias(longest + beyond, longest)[:, :, beyond:]

        return {**own, "compute_bias": compute}

    for module in (seams.bias, seams.formula):
        monkeypatch.setattr(module, "of_longest", over_the_row)
    assert not fa2patch.verify(model, strict=False).ok


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_cross_attention_that_sees_all_sources_is_an_error(family, monkeypatch):
    model = built(family)
    fa2patch.apply(model)
    before = cross.before

    def without_a_mask(step):
        before(step)
        if ENCODED_MASK in step.call and step.role.innermost:
            step.call[ENCODED_MASK] = None

    monkeypatch.setattr(cross, "before", without_a_mask)
    with pytest.raises(PackingNotIsolated, match="attention layers only"):
        model(**pairs(family).packed())
