"""What changes between two packed batches counts in the next one, whatever a forward keeps of the one before."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref

import pytest
import torch
import transformers
from packed_rows import built, deterministic

import fa2patch
from compat_matrix.check.reads import calls
from compat_matrix.check.rows import documents, pack
from fa2patch.kernels import picks
from fa2patch.kernels.reference import Reference
from fa2patch.upstream.find_documents import packed_mask_of

DOCS = documents(5, 9, 3)
OTHER_DOCS = documents(2, 4, 4, 1)

of_interfaces = pytest.mark.skipif(
    not hasattr(transformers.modeling_utils, "ALL_ATTENTION_FUNCTIONS"),
    reason="before 4.48, a layer's own eager code is run, and forwards take no keywords that they do not name",
)


class Noting(Reference):
    # It notes what it is called with.

    name = "noting"

    def __init__(self):
        self.noted = []

    def __call__(self, q, k, v, boundaries, options):
        self.noted.append((q.dtype, options, q.requires_grad))
        return super().__call__(q, k, v, boundaries, options)


def layers(model):
    return [layer.self_attn for layer in model.model.layers]


def each(model, attribute, value):
    for layer in layers(model):
        setattr(layer, attribute, value)


def in_half(model):
    for layer in layers(model):
        layer.to(torch.bfloat16)
        layer.register_forward_pre_hook(_in_half, with_kwargs=True)
        layer.q_proj.register_forward_hook(lambda module, args, output: output.float())


def _in_half(module, args, kwargs):
    return args, {**kwargs, "hidden_states": kwargs["hidden_states"].bfloat16()}


def adapted(model):
    for layer in layers(model):
        inside = layer.q_proj
        layer.q_proj = torch.nn.Sequential(
            inside, torch.nn.Linear(inside.out_features, inside.out_features, bias=False)
        )
        torch.nn.init.eye_(layer.q_proj[1].weight)


CHANGES = {
    "nothing": lambda model: None,
    "weights in half precision": lambda model: model.to(torch.bfloat16),
    "weights in float64": lambda model: model.double(),
    "weights in half precision under queries in float32": in_half,
    "an adapter around the weight": adapted,
    "another scale": lambda model: each(model, "scaling", 0.05),
    "dropout of everything in training": lambda model: (each(model, "attention_dropout", 1.0), model.train()),
    "not causal any more": lambda model: each(model, "is_causal", False),
    "another kernel": lambda model: fa2patch.apply(model, kernel="reference"),
    "a window": lambda model: each(model, "sliding_window", 2),
    "attention of the user's": lambda model: model.set_attn_implementation("of_the_user"),
    "eager": lambda model: model.set_attn_implementation("eager"),
}  # fmt: skip

CONTEXTS = {
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": deterministic,
}


@pytest.fixture
def kernel(monkeypatch):
    noting = Noting()
    monkeypatch.setattr(picks, "_registered", [(noting, None)])
    return noting


def attention_of_users(module, query, key, value, attention_mask, **kwargs):
    return query.transpose(1, 2) * 0, None


def result(model, docs, context):
    # Logits and gradients, or the kind of the error.
    try:
        with context():
            logits = model(**pack(docs)).logits
            if logits.requires_grad:
                logits.float().square().mean().backward()
    except fa2patch.errors.Fa2PatchError as error:
        return type(error), str(error)
    grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
    model.zero_grad()
    return [logits, *grads]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def warm(model):
    for _ in range(3):
        result(model, OTHER_DOCS, contextlib.nullcontext)
        result(model, DOCS, torch.no_grad)


@pytest.mark.skipif(not hasattr(transformers, "AttentionInterface"), reason="attention of users is not registered yet")
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_model_is_seen(change, kernel, monkeypatch):
    # The result is that of a model that was changed before its first batch, and the kernel is given the same.
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "of_the_user", attention_of_users)
    model, fresh = built("llama"), built("llama")
    for one in (model, fresh):
        fa2patch.apply(one, kernel=kernel, prove=False)  # a proof of hooks would call the kernel, too
    warm(model)
    CHANGES[change](model)
    CHANGES[change](fresh)
    result(fresh, DOCS, contextlib.nullcontext)  # it may try the kernel
    kernel.noted.clear()
    expected = result(fresh, DOCS, contextlib.nullcontext)
    given, kernel.noted = kernel.noted, []
    for _ in range(2):
        kernel.noted.clear()
        assert_same(result(model, DOCS, contextlib.nullcontext), expected)
        assert kernel.noted == given
    if not isinstance(expected, tuple):  # else no layer of the fresh one was computed
        made = [[layer.kernel for layer in fa2patch.status(one).layers] for one in (model, fresh)]
        assert made[0] == made[1]


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_change_around_the_model_is_seen(context, kernel):
    model, fresh = built("llama"), built("llama")
    for one in (model, fresh):
        fa2patch.apply(one, kernel=kernel)
    warm(model)
    result(fresh, DOCS, CONTEXTS[context])  # it may try the kernel
    kernel.noted.clear()
    expected = result(fresh, DOCS, CONTEXTS[context])
    given, kernel.noted = kernel.noted, []
    assert_same(result(model, DOCS, CONTEXTS[context]), expected)
    assert kernel.noted == given
    kernel.noted.clear()
    assert_same(result(model, DOCS, contextlib.nullcontext), result(fresh, DOCS, contextlib.nullcontext))


@of_interfaces
def test_a_tensor_of_unknown_meaning_is_refused_in_a_later_batch():
    model = built("llama")
    fa2patch.apply(model)
    warm(model)
    with pytest.raises(fa2patch.errors.PackingNotIsolated, match="token_weights"):
        model(**pack(DOCS), token_weights=torch.ones(1, 17))


# Calls that are kept for the next batch


@of_interfaces
def test_only_calls_of_one_kind_are_prepared_once():
    # Two kinds of a layer, with gradients and without. Lengths are no kind.
    model = built("llama")
    patch = fa2patch.apply(model)
    warm(model)
    assert len(patch.picks.prepared) == 2 * len(layers(model))
    result(model, documents(1, 2, 30), contextlib.nullcontext)
    assert len(patch.picks.prepared) == 2 * len(layers(model))


def test_a_class_that_is_not_causal_any_more_is_seen():
    model = built("llama")
    own = type("Ours", (type(layers(model)[0]),), {"is_causal": True, "__module__": type(layers(model)[0]).__module__})
    for layer in layers(model):
        del layer.is_causal
        layer.__class__ = own
    fa2patch.apply(model)
    warm(model)
    own.is_causal = False
    with pytest.raises(fa2patch.errors.PackingNotIsolated, match="is_causal=False"):
        model(**pack(DOCS))


def test_a_layer_that_is_not_known_is_looked_at_in_each_call():
    # GPT-NeoX of some releases hands no layer to its function.
    model = built("llama")
    patch = fa2patch.apply(model)
    states = torch.randn(1, 2, 17, 8)
    mask = packed_mask_of(pack(DOCS), patch)
    assert mask.kind_of(None, states, states, states, {}) is None
    assert mask.kind_of(layers(model)[0], states, states, states, {}) is not None


def test_kinds_without_end_are_not_kept(monkeypatch):
    monkeypatch.setattr("fa2patch.upstream.packed_mask.MOST", 3)
    model = built("llama")
    patch = fa2patch.apply(model)
    for number in range(9):
        each(model, "scaling", 0.1 + number)
        warm(model)
        assert len(patch.picks.prepared) <= 3


def test_a_layer_that_is_gone_is_not_kept_alive():
    model = built("llama")
    fa2patch.apply(model)
    warm(model)
    gone = weakref.ref(layers(model)[0])
    model.model.layers[0].self_attn = copy.deepcopy(layers(model)[0])
    fa2patch.apply(model)  # until then, the model's structure is kept
    gc.collect()
    assert gone() is None
    assert_same(result(model, DOCS, torch.no_grad), result(model, DOCS, torch.no_grad))


@of_interfaces
def test_a_prepared_layer_takes_few_calls(kernel):
    # Counted between two forwards that differ in layers only: the seam's calls, without those of the kernel.
    counts = []
    for number in (2, 6):
        model = built("llama", num_hidden_layers=number)
        fa2patch.apply(model, kernel=kernel)
        with torch.no_grad():
            warm(model)
            counts.append(calls(lambda one=model: one(**pack(DOCS))))
    few, many = counts
    each = {name: (many[name] - few[name]) // 4 for name in many if name.startswith("fa2patch.upstream.")}
    looked_up = each.get("fa2patch.upstream.seams.interface.__getitem__", 0)  # up to 4.57, models index the table
    assert sum(each.values()) <= 5 + looked_up, {name: count for name, count in each.items() if count}
