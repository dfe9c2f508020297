"""Pairs within a budget of tokens: each stack computes its own tokens in passes of whole documents."""

from __future__ import annotations

import warnings

import pytest
import torch
from pairs import FAMILIES, SPOKEN, built, gradients, pairs

import fa2patch
from compat_matrix.check.compare import assert_same_gradients
from fa2patch.documents.row_shape import RowShape
from fa2patch.errors import OverBudget, PackingError
from fa2patch.patch.applying import budget_of


def computed(model, batch):
    model.zero_grad()
    output = model(**batch)
    output.loss.backward()
    return output, gradients(model)


def passes_of(model, batch):
    # the tokens of each forward of the first block of both stacks
    seen = {}
    hooks = []
    for side, stack in (("sources", model.get_encoder()), ("targets", model.get_decoder())):
        blocks = next(child for child in stack.modules() if isinstance(child, torch.nn.ModuleList) and len(child))

        def note(module, args, kwargs, side=side):
            seen.setdefault(side, []).append((args or tuple(kwargs.values()))[0].shape[1])

        hooks.append(blocks[0].register_forward_pre_hook(note, with_kwargs=True))
    with torch.no_grad():
        for _ in range(3):  # whether a head reads padding is tried with the first two padded batches
            seen.clear()
            model(**batch)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("way", ["packed", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_stack_computes_passes_of_whole_documents(family, way):
    model, batch = built(family).train(), pairs(family)
    fa2patch.apply(model, prove=False)
    before, expected = computed(model, batch.packed())
    given = batch.packed() if way == "packed" else batch.padded(model.config.pad_token_id)
    if family in SPOKEN and way == "padded":
        given = {"input_features": torch.cat(batch.sources), "labels": given["labels"]}
    fa2patch.apply(model, padded_batches=way == "padded", max_tokens=10)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        output, found = computed(model, given)
    whole = [one for one in caught if one.category is OverBudget]
    assert output.loss.item() == pytest.approx(before.loss.item(), rel=1e-5)
    logits = output.logits if way == "packed" else output.logits[given["labels"] != -100][None]
    torch.testing.assert_close(logits, before.logits, rtol=1e-4, atol=1e-4)
    assert_same_gradients(found, expected, 1e-4, 0.01)
    if whole:  # in old releases, Switch returns a number that is of no token
        assert family == "switch" and "router_probs" in str(whole[0].message)
        return
    passes = passes_of(model, given)
    assert sum(passes["targets"]) == 21 and max(passes["targets"]) <= 10
    if family not in SPOKEN:
        assert sum(passes["sources"]) == 22 and max(passes["sources"]) <= 10


def test_states_with_numbers_are_cut_with_their_targets():
    # a decoder by itself
    model, batch = built("t5"), pairs("t5")
    fa2patch.apply(model.decoder, prove=False)
    states = torch.randn(1, 22, 32, generator=torch.Generator().manual_seed(0))
    numbers = torch.cat([torch.full((source.shape[1],), at + 1) for at, source in enumerate(batch.sources)])[None]
    ids = torch.cat([torch.arange(target.shape[1]) for target in batch.targets])[None]
    call = {"input_ids": torch.cat(batch.targets, 1), "position_ids": ids}
    call.update(encoder_hidden_states=states, encoder_attention_mask=numbers)
    before = model.decoder(**call)[0]
    fa2patch.apply(model.decoder, max_tokens=10)
    torch.testing.assert_close(model.decoder(**call)[0], before, rtol=1e-5, atol=1e-5)


def test_a_target_that_is_too_long_is_an_error():
    model, batch = built("t5"), pairs("t5")
    fa2patch.apply(model, prove=False, max_tokens=6)
    with pytest.raises(PackingError, match="longer than max_tokens=6"):
        model(**batch.packed())
    fa2patch.apply(model, max_tokens=6, too_long="alone")
    fa2patch.revert(model)
    fa2patch.apply(model, prove=False)
    assert all(patch.budget is None for patch in fa2patch.status(model).stacks)


def test_what_no_pass_can_be_told_is_computed_at_once():
    model, batch = built("bart"), pairs("bart")
    fa2patch.apply(model, prove=False)
    before = model(**batch.packed()).loss.item()
    fa2patch.apply(model, max_tokens=10)
    compiled = torch.compile(model, backend="eager")
    with pytest.warns(OverBudget, match="a compiled pass cannot be told"):
        assert compiled(**batch.packed()).loss.item() == pytest.approx(before, rel=1e-5)
    torch.compiler.reset()
    fa2patch.status(model).limit(budget_of(10, "error", RowShape(pad_to_multiple_of=5, max_tokens=10)))
    with pytest.warns(OverBudget, match="padding of stated shapes, which has no source"):
        assert model(**batch.packed()).loss.item() == pytest.approx(before, rel=1e-5)
