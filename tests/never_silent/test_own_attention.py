"""Attention of the user's own: packed rows are computed with it, or refused, and never with a kernel in its place."""

from __future__ import annotations

import functools
import sys

import pytest
import torch
import transformers
from small_models import alone, assert_right, called, labelled, llama, of_family, patched, refusal, right_or_refused

import fa2patch
from fa2patch import errors
from fa2patch.upstream import inspecting, transformers_names

modeling = sys.modules[transformers.LlamaForCausalLM.__module__]
REGISTRY = getattr(sys.modules["transformers.modeling_utils"], transformers_names.ATTENTION_FUNCTIONS[0], None)
HAS_REGISTRY = REGISTRY is not None and hasattr(modeling, transformers_names.ATTENTION_FUNCTIONS[0])
registry_only = pytest.mark.skipif(not HAS_REGISTRY, reason="Llama's attention is not looked up in a dictionary here")
classes_only = pytest.mark.skipif(HAS_REGISTRY, reason="Llama's attention is looked up in a dictionary here")


def blunt(module, query, key, value, attention_mask, *args, **kwargs):
    # The scores have half the size.
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, 1) for states in (key, value))
    scores = query @ key.transpose(2, 3) * 0.5 * kwargs.get("scaling", query.shape[-1] ** -0.5)
    length = query.shape[2]
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(later, float("-inf")).softmax(-1).nan_to_num()
    return (weights @ value).transpose(1, 2).contiguous(), None


def wrapping(inner):
    # The wrapper keeps the name and the module of what it wraps.

    @functools.wraps(inner)
    def half(module, query, *args, **kwargs):
        return inner(module, query * 0.5, *args, **kwargs)

    return half


def registered(monkeypatch):
    monkeypatch.setitem(getattr(REGISTRY, "_global_mapping", REGISTRY), "blunt", blunt)
    return "blunt"


def in_place_of_sdpa(monkeypatch):
    monkeypatch.setitem(getattr(REGISTRY, "_global_mapping", REGISTRY), "sdpa", wrapping(REGISTRY["sdpa"]))
    return "sdpa"


def in_place_of_eager(monkeypatch):
    monkeypatch.setattr(modeling, transformers_names.EAGER, wrapping(getattr(modeling, transformers_names.EAGER)))
    return "eager"


def in_place_of_torchs(monkeypatch):
    inner = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda query, *args, **kwargs: inner(query * 0.5, *args, **kwargs),
    )
    return "sdpa"


WAYS = [
    *(pytest.param(way, marks=registry_only) for way in (registered, in_place_of_sdpa, in_place_of_eager)),
    in_place_of_torchs,
]


def assert_packed(model, expected):
    assert_right(called(patched(model), labelled()), expected)


def assert_other(plain, expected):
    assert not torch.allclose(plain.logits, expected.logits, atol=1e-3)


def with_implementation(model, implementation):
    model.config._attn_implementation = implementation
    return model


@pytest.mark.parametrize("way", WAYS)
def test_a_function_from_before_apply_computes_each_document(way, monkeypatch):
    plain = alone(llama())
    implementation = way(monkeypatch)
    expected = alone(with_implementation(llama(), implementation))
    if torch.allclose(plain.logits, expected.logits, atol=1e-3):
        pytest.skip("Llama does not call this function here")
    model = patched(with_implementation(llama(), implementation))
    for _ in range(2):
        assert_right(called(model, labelled()), expected)


@registry_only
@pytest.mark.parametrize("way", [registered, in_place_of_sdpa, in_place_of_eager])
def test_a_function_from_after_apply_is_refused_until_the_next_apply(way, monkeypatch):
    model = patched()
    model(**labelled())
    with_implementation(model, way(monkeypatch))
    expected = alone(with_implementation(llama(), model.config._attn_implementation))
    first = right_or_refused(lambda: called(model, labelled()), expected)
    assert first != "right" or way is in_place_of_eager  # such a wrapper is around the replacement, up to 4.57
    assert_packed(model, expected)


@registry_only
@pytest.mark.slow
def test_a_compiled_model_refuses_it_too(monkeypatch):
    model = patched()
    with_implementation(model, registered(monkeypatch))
    with pytest.raises(errors.PackingNotIsolated, match="attention with"):
        torch.compile(model, backend="eager")(**labelled())


@registry_only
def test_dense_calls_keep_the_function(monkeypatch):
    implementation = registered(monkeypatch)
    expected = alone(with_implementation(llama(), implementation))
    model = patched(with_implementation(llama(), implementation))
    assert torch.equal(alone(model).logits, expected.logits)


def no_rotary(self, hidden_states, attention_mask=None, position_ids=None, **kwargs):
    # The layer computes everything itself, as replacements of a class's forward do.
    rows, length, _ = hidden_states.shape
    q, k, v = (
        projection(hidden_states).view(rows, length, -1, self.head_dim).transpose(1, 2)
        for projection in (self.q_proj, self.k_proj, self.v_proj)
    )
    k, v = (states.repeat_interleave(q.shape[1] // k.shape[1], 1) for states in (k, v))
    output = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    output = self.o_proj(output.transpose(1, 2).reshape(rows, length, -1))
    return (output, None) if HAS_REGISTRY else (output, None, None)


def test_a_forward_of_the_users_own_on_the_class(monkeypatch):
    model = llama(use_cache=False)
    plain = alone(model)
    cls = type(model.model.layers[0].self_attn)
    monkeypatch.setattr(cls, "forward", no_rotary)
    expected = alone(model)
    assert_other(plain, expected)
    assert_packed(model, expected)


@classes_only
@pytest.mark.parametrize("attribute", ["forward", "_flash_attention_forward"])
def test_a_flash_class_of_the_users_own_computes_no_packed_row_of_another_class(attribute, monkeypatch):
    flash = modeling.LlamaFlashAttention2
    inner = getattr(flash, attribute, None)
    if inner is None:
        pytest.skip("the flash class has no such method here")
    monkeypatch.setattr(flash, attribute, lambda *args, **kwargs: pytest.fail("this function is not asked for"))
    assert_packed(llama(), alone(llama()))


def test_a_function_in_a_models_own_dictionary(monkeypatch):
    # Gemma 2 in 4.47 has a dictionary of its own.
    model = of_family("gemma2")
    home = sys.modules[type(model.model.layers[0].self_attn).__module__]
    table = getattr(home, "GEMMA2_ATTENTION_FUNCTION", None)
    if table is None:
        pytest.skip("Gemma 2 has no dictionary of its own here")
    implementation = model.config._attn_implementation
    plain = alone(model)
    monkeypatch.setitem(
        table,
        implementation,
        lambda config, query, *rest, inner=table[implementation], **named: inner(config, query * 0.5, *rest, **named),
    )
    expected = alone(model)
    assert_other(plain, expected)
    assert_packed(model, expected)


# Masks of the user's own: here each document's first two tokens see each other, as in a prefix


def prefix_mask(length, dtype):
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    seen[:2, :2] = True
    return torch.zeros(length, length, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)[None, None]


def prefix_mask_of(args, kwargs):
    embedded = next(each for each in (*args, *kwargs.values()) if getattr(each, "ndim", 0) == 3)
    return prefix_mask(embedded.shape[1], embedded.dtype)


def mask_in_the_dictionary(model, monkeypatch):
    masking = sys.modules.get("transformers.masking_utils")
    table = getattr(masking, transformers_names.MASK_FUNCTIONS[0], None)
    if table is None:
        pytest.skip("masks are not made by a function in a dictionary here")
    names = inspecting.parameter_names(table["eager"])

    def make(*args, **kwargs):
        given = {**dict(zip(names, args)), **kwargs}
        return prefix_mask(given["kv_length"], torch.float32)

    monkeypatch.setitem(getattr(table, "_global_mapping", table), "eager", make)


def mask_of_a_subclass(model, monkeypatch):
    # LLM2Vec and prefix language models do it in this way.
    name = "_update_causal_mask"
    if not hasattr(type(model.model), name):
        pytest.skip("masks are not made by a method here")

    class Prefix(type(model.model)):
        def _update_causal_mask(self, *args, **kwargs):
            return prefix_mask_of(args, kwargs)

    model.model.__class__ = Prefix


def mask_of_the_module(model, monkeypatch):
    name = next(
        (name for name in ("create_causal_mask", "_prepare_4d_causal_attention_mask") if hasattr(modeling, name)), ""
    )
    if not name:
        pytest.skip("masks are made by a method here")

    monkeypatch.setattr(modeling, name, lambda *args, **kwargs: prefix_mask_of(args, kwargs))


@pytest.mark.parametrize("way", [mask_in_the_dictionary, mask_of_a_subclass, mask_of_the_module])
def test_masks_of_the_users_own_are_those_of_each_document(way, monkeypatch):
    plain, model, reference = (of_family("llama", "eager") for _ in range(3))
    plain = alone(plain)
    for each in (model, reference):
        way(each, monkeypatch)
    expected = alone(reference)
    assert_other(plain, expected)
    assert_packed(model, expected)


def test_a_registered_mask_from_after_apply_is_refused_until_the_next_apply(monkeypatch):
    model = patched(of_family("llama", "eager"))
    model(**labelled())
    mask_in_the_dictionary(model, monkeypatch)
    with refusal(r"(?s)masks are made by .*apply\(model\) again", errors.PackingNotIsolated):
        model(**labelled())
    fa2patch.apply(model)
    assert_right(called(model, labelled()), alone(of_family("llama", "eager")))


@pytest.mark.parametrize("when", ["before apply", "after apply", "after a packed batch"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_is_causal_of_the_layers_is_what_padded_training_goes_by(implementation, when):
    # LLM2Vec sets ``is_causal = False``, which up to 4.47 means nothing to eager attention and sdpa.

    def turned(model):
        for layer in model.model.layers:
            layer.self_attn.is_causal = False
        return model

    expected = alone(turned(of_family("llama", implementation)))
    model = of_family("llama", implementation)
    if when == "before apply":
        turned(model)

    def run():
        fa2patch.apply(model)
        if when == "after a packed batch":
            model(**labelled())
        turned(model)
        return called(model, labelled())

    right_or_refused(run, expected)
