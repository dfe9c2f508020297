"""Packed rows have the windows that padded training has: none where a release has one in flash attention only."""

from __future__ import annotations

import warnings

import pytest
import torch
import transformers
from torch.nn.utils.rnn import pad_sequence

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.check.compare import GRADIENT_TOLERANCE, assert_close, assert_same_gradients
from compat_matrix.check.rows import documents, pack

SMALL = 4
DOCS = documents(20, 7, 15)
FAMILIES = {
    "qwen2": {"use_sliding_window": True, "max_window_layers": 0},
    "qwen2_moe": {"use_sliding_window": True, "max_window_layers": 0},
    "phi3": {}, "starcoder2": {}, "mixtral": {}, "jamba": {}, "olmoe": {}, "mistral": {}, "gemma2": {}, "cohere2": {},
}  # fmt: skip


def built(family, implementation, size=SMALL):
    if not tiny_models.is_present(family):
        pytest.skip(f"Transformers {transformers.__version__} has no {family}")
    return tiny_models.build(family, implementation, **{**FAMILIES[family], "sliding_window": size})


def padded_logits(model):
    ids, mask = (pad_sequence(rows, batch_first=True) for rows in (DOCS, [torch.ones_like(doc) for doc in DOCS]))
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return torch.cat([one[: len(doc)] for one, doc in zip(logits, DOCS)])


def gradients(model):
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_have_the_window_of_padded_ones(family, implementation):
    if family == "gemma2" and implementation == "sdpa":
        return  # its sdpa leaves the softcap out, which the definition has
    try:
        reference, model = built(family, implementation), built(family, implementation)
    except ValueError as error:
        pytest.skip(str(error))  # upstream has no sdpa
    wide = padded_logits(built(family, implementation, 96)).detach()
    expected = padded_logits(reference)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fa2patch.apply(model)
    found = model(**pack(DOCS), use_cache=False).logits[0]
    assert_close(found.detach(), expected.detach(), "logits")
    (expected.square().sum() / 1e4).backward()
    (found.square().sum() / 1e4).backward()
    assert_same_gradients(gradients(model), gradients(reference), GRADIENT_TOLERANCE, 0.01)
    said = [each for each in caught if "neither eager attention nor sdpa has a window" in str(each.message)]
    has_one = not torch.allclose(wide, expected.detach(), rtol=1e-3, atol=1e-3)
    assert bool(said) == (not has_one and flash_has_one(family)), "warned of just where flash attention alone has one"


def flash_has_one(family):
    # Whether packed rows have a window in a model that is loaded with flash attention.
    return not torch.allclose(*(of_flash(family, size) for size in (SMALL, 96)), rtol=1e-3, atol=1e-3)


def of_flash(family, size):
    model = built(family, "eager", size)
    model.config._attn_implementation = "flash_attention_2"
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fa2patch.apply(model)
        return model(**pack(DOCS), use_cache=False).logits[0]


@pytest.mark.parametrize("family", ["qwen2", "phi3", "mistral"])
def test_with_flash_attention_they_have_the_window_of_flash_attention(family):
    assert flash_has_one(family)


def test_no_window_is_warned_of_where_none_is_asked_for():
    families = {"qwen2": {"use_sliding_window": False}, "llama": {}}
    for family, changes in ((name, changes) for name, changes in families.items() if tiny_models.is_present(name)):
        model = tiny_models.build(family, "sdpa", **changes)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            fa2patch.apply(model)


def test_functions_of_torch_that_are_replaced_later(monkeypatch):
    # Transformers' symbolic_trace leaves such functions in torch if it fails.
    for name in ("ones_like", "tril", "where"):
        own = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, own=own, **given: own(*args, **given))
    model, whole = built("gemma2", "eager"), built("gemma2", "eager")
    fa2patch.apply(model)
    assert_close(model(**pack(DOCS), use_cache=False).logits[0].detach(), padded_logits(whole).detach(), "logits")
