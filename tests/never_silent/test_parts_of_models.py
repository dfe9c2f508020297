"""A part of a patched model that is copied is a model of its own."""

from __future__ import annotations

import copy

import pytest
import torch
from small_models import DOCS, alone, called, labels_of, llama, right_or_refused, told

import fa2patch
from compat_matrix.check.compare import assert_close


def hidden(base, docs=DOCS):
    with torch.no_grad():
        return base(**told(docs, "position_ids"), use_cache=False).last_hidden_state[0]


def expected():
    base = llama().model
    with torch.no_grad():
        return torch.cat([base(doc[None], use_cache=False).last_hidden_state[0] for doc in DOCS])


def test_a_copied_base_model_is_patched_by_itself():
    model = llama()
    fa2patch.apply(model)
    base = copy.deepcopy(model.model)
    assert fa2patch.status(base).model is base and fa2patch.status(model).model is model
    fa2patch.revert(model)
    assert fa2patch.status(model) is None and fa2patch.status(base) is not None
    assert_close(hidden(base), expected(), "hidden states")


def test_a_reverted_copy_of_the_base_leaves_the_original_patched():
    model = llama()
    fa2patch.apply(model)
    base = copy.deepcopy(model.model)
    fa2patch.revert(base)
    assert fa2patch.status(base) is None and fa2patch.status(model).active
    unpatched = llama().model
    assert torch.equal(hidden(base), hidden(unpatched))
    found = called(model, model, told(DOCS, "position_ids", labels=labels_of(DOCS, 7)))
    assert right_or_refused(lambda: found, alone(llama())) == "right"


def test_apply_to_a_copy_of_the_base_patches_no_other_model():
    model = llama()
    fa2patch.apply(model)
    base = copy.deepcopy(model.model)
    fa2patch.revert(model)
    fa2patch.apply(base)
    assert fa2patch.status(model) is None
    plain = llama()
    batch = told(DOCS, "position_ids")
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, plain(**batch).logits)
    assert_close(hidden(base), expected(), "hidden states")


@pytest.mark.parametrize("renewed", [False, True], ids=["as it is", "apply"])
def test_a_copied_base_in_another_model(renewed):
    """Without ``apply`` the model around it is not patched, and its labels may cross documents: no loss is taken."""
    model, other = llama(), llama()
    fa2patch.apply(model)
    other.model = copy.deepcopy(model.model)
    if renewed:
        fa2patch.apply(other)
        found = called(other, other, told(DOCS, "position_ids", labels=labels_of(DOCS, 7)))
        assert right_or_refused(lambda: found, alone(llama())) == "right"
    logits = other(**told(DOCS, "position_ids")).logits[0].detach()
    assert_close(logits, alone(llama()).logits, "logits")


def test_a_model_that_is_copied_whole_is_as_before():
    model = llama()
    fa2patch.apply(model)
    other = copy.deepcopy(model)
    fa2patch.revert(model)
    assert fa2patch.status(other).model is other
    found = called(other, other, told(DOCS, "position_ids", labels=labels_of(DOCS, 7)))
    assert right_or_refused(lambda: found, alone(llama())) == "right"
