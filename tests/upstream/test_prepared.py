"""Each thing that a prepared call depends on makes another kind of call, or is asked for in each call.

Attention is called here as a layer calls it, so that one thing changes and nothing else does. In a model, other parts
notice many of these changes first (``test_later_batches.py``).
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch
from packed_rows import built, deterministic
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.llama import modeling_llama

import fa2patch
from compat_matrix.check.rows import documents, pack
from fa2patch.kernels import picks
from fa2patch.kernels.reference import Reference
from fa2patch.upstream.find_documents import packed_mask_of

pytestmark = pytest.mark.skipif(
    not hasattr(modeling_llama, "ALL_ATTENTION_FUNCTIONS"), reason="calls are prepared where attention is a function"
)

TOKENS = 17


class Noting(Reference):
    # It notes what it is called with, and what it is asked to support.

    name = "noting"

    def __init__(self):
        self.noted, self.asked = [], set()

    def supports(self, asked):
        self.asked.add(asked)
        return super().supports(asked)

    def __call__(self, q, k, v, boundaries, options):
        self.noted.append((q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, options, boundaries.parents is None))
        return super().__call__(q, k, v, boundaries, options)


class Layer:
    # The attention function is the flash one, for which the dtype of a weight decides, too.

    def __init__(self, dtype=torch.float32):
        self.kernel = Noting()
        self.model = built("llama").to(dtype)
        self.patch = fa2patch.apply(self.model, kernel=self.kernel)
        self.module = self.model.model.layers[0].self_attn
        self.mask = packed_mask_of(pack(documents(5, 9, 3)), self.patch)
        self.attention = modeling_llama.ALL_ATTENTION_FUNCTIONS["flash_attention_2"]
        self.states = {name: self.of_heads(2, dtype=dtype) for name in ("query", "key", "value")}
        self.options = {"dropout": 0.0, "scaling": 0.3}
        self.context = contextlib.nullcontext

    @staticmethod
    def of_heads(heads, dim=8, tokens=TOKENS, dtype=torch.float32, rows=1):
        return torch.linspace(-1, 1, rows * heads * tokens * dim, dtype=dtype).view(rows, heads, tokens, dim)

    def computed(self):
        # The output or the error of a call, and what the kernel was given.
        self.kernel.noted.clear()
        torch.manual_seed(0)
        try:
            with self.context():
                found = self.attention(self.module, *self.states.values(), self.mask, **self.options)[0]
        except fa2patch.errors.Fa2PatchError as error:
            found = repr(error)
        return found, str([call for call in self.kernel.noted if call[0][0] == TOKENS])  # others are of its trial


@pytest.fixture(autouse=True)
def _no_kernel_is_left(monkeypatch):
    monkeypatch.setattr(picks, "_registered", [])


def with_mask(**fields):
    def change(layer):
        layer.mask = replace(layer.mask, **fields)

    return change


def with_states(**states):
    return lambda layer: layer.states.update(states)


def with_options(**options):
    return lambda layer: layer.options.update(options)


def within(context):
    return lambda layer: setattr(layer, "context", context)


def of_a_tree(layer):
    # The second document continues the first one.
    boundaries = replace(layer.mask.boundaries, parents=torch.tensor([-1, 0, -1], dtype=torch.int32), made={})
    layer.mask = replace(layer.mask, boundaries=boundaries)


def with_a_span(layer):
    until = torch.arange(TOKENS, dtype=torch.int32)
    until[1:3] = 3
    layer.mask = replace(layer.mask, boundaries=replace(layer.mask.boundaries, until=until, made={}))


def with_quirk(**functions):
    def change(layer):
        facts = layer.mask.facts
        layer.mask = replace(layer.mask, facts=replace(facts, architecture=replace(facts.architecture, **functions)))

    return change


def in_training(layer):
    for states in layer.states.values():
        states.requires_grad_()


def replaced(name, *inside):
    # Another module, or none, stands in the place of the one that has the weight.

    def change(layer):
        del layer.module._modules["q_proj"]
        for each in inside:
            layer.module._modules["q_proj"] = each
        layer.module.k_proj.to(torch.bfloat16)

    return change


def with_a_function_that_casts_nothing(layer):
    layer.module.to(half)
    layer.attention = modeling_llama.ALL_ATTENTION_FUNCTIONS["sdpa"]


half, of_heads = torch.bfloat16, Layer.of_heads
CHANGES = {
    "a layer that is not causal": lambda layer: setattr(layer.module, "is_causal", False),
    "another window of the mask": with_mask(window=2),
    "a tree": of_a_tree,
    "query heads": with_states(query=of_heads(4)),
    "query heads that do not fit": with_states(query=of_heads(3)),
    "key heads": with_states(key=of_heads(1)),
    "value heads": with_states(value=of_heads(1)),
    "key and value heads": with_states(key=of_heads(1), value=of_heads(1)),
    "head dim": with_states(query=of_heads(2, 4), key=of_heads(2, 4)),
    "value dim": with_states(value=of_heads(2, 4)),
    "dtype of q": with_states(query=of_heads(2, dtype=half)),
    "dtype of k": with_states(key=of_heads(2, dtype=half)),
    "dtype of v": with_states(value=of_heads(2, dtype=half)),
    "autocast": within(lambda: torch.autocast("cpu", half)),
    "gradients": in_training,
    "deterministic": within(deterministic),
    "a span": with_a_span,
    "options of the architecture": with_quirk(adjust=lambda module, options: replace(options, scale=7.0)),
    "queries of the architecture": with_quirk(queries=lambda module, q, positions: 2 * q),
    "sinks": with_options(s_aux=torch.ones(2)),
    "sinks by their other name": with_options(sinks=torch.ones(2)),
    "a tensor of unknown meaning": with_options(weights=torch.ones(TOKENS)),
    "other rows": with_states(key=of_heads(2, rows=2)),
    "other rows of values": with_states(value=of_heads(2, rows=2)),
    "other tokens": with_states(key=of_heads(2, tokens=TOKENS + 1)),
    "other tokens of values": with_states(value=of_heads(2, tokens=TOKENS + 1)),
    "a scale": with_options(scaling=0.7),
    "a window": with_options(sliding_window=2),
    "softcap": with_options(softcap=3.0),
    "dropout": with_options(dropout=1.0),
    "a function that casts nothing": with_a_function_that_casts_nothing,
    "a weight in half precision": lambda layer: layer.module.q_proj.to(half),
    "a weight that is gone": replaced("q_proj"),
    "a module of another kind around the weight": replaced("q_proj", torch.nn.Identity()),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_gives_what_it_gives_where_nothing_is_kept(change):
    kept, fresh = Layer(), Layer()
    for _ in range(3):
        kept.computed()
    assert len(kept.patch.picks.prepared) == 1
    for layer in (kept, fresh):
        CHANGES[change](layer)
    expected = fresh.computed()
    for _ in range(2):  # the second call may be of a new kind that is kept
        found = kept.computed()
        assert found[1] == expected[1] and type(found[0]) is type(expected[0])
        if isinstance(found[0], str):
            assert found[0] == expected[0]
        else:
            assert torch.equal(found[0], expected[0])
    assert kept.kernel.asked >= fresh.kernel.asked


def test_states_are_cast_to_the_dtype_of_weights_only_by_a_function_that_does_so():
    layer = Layer()
    layer.module.to(half)
    assert {layer.computed()[0].dtype for _ in range(3)} == {half}
    layer.attention = modeling_llama.ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert {layer.computed()[0].dtype for _ in range(3)} == {torch.float32}


def test_a_scale_whose_value_changes_is_looked_at_in_each_call():
    layer, scale = Layer(), torch.tensor(0.3)
    layer.options["scaling"] = scale
    before = layer.computed()[0]
    scale.mul_(2)
    changed = layer.computed()[0]
    assert not layer.patch.picks.prepared
    layer.options["scaling"] = 0.6
    assert not torch.allclose(before, changed)
    torch.testing.assert_close(layer.computed()[0], changed)


def test_a_call_that_is_not_causal_is_another_kind():
    # The keyword decides where the layer has no ``is_causal``.
    kept = Layer()
    del kept.module.is_causal
    for _ in range(3):
        kept.computed()
    kept.options["is_causal"] = False
    assert "causal=False" in kept.computed()[1]


def test_gradients_that_are_switched_off_are_another_kind():
    kept = Layer()
    in_training(kept)
    for _ in range(3):
        kept.computed()
    assert {asked.gradients for asked in kept.kernel.asked} == {True}
    kept.context = torch.no_grad
    kept.computed()
    assert {asked.gradients for asked in kept.kernel.asked} == {True, False}


def test_a_part_of_the_row_and_states_without_values_are_looked_at_in_each_call():
    layer = Layer()
    q = layer.states["query"].to(half)
    assert layer.mask.kind_of(layer.module, q, q, q, {}) is not None
    assert replace(layer.mask, part=object()).kind_of(layer.module, q, q, q, {}) is None
    q = q.to("meta")
    assert layer.mask.kind_of(layer.module, q, q, q, {}) is None


def test_a_device_is_a_kind():
    layer, kinds = Layer(), set()
    with FakeTensorMode():
        for device in ("cpu", "cuda:0", "cuda:1"):
            q = torch.empty(1, 2, TOKENS, 8, device=device, dtype=half)
            kinds.add(layer.mask.kind_of(layer.module, q, q, q, {}))
    assert len(kinds) == 3


def test_another_layer_that_has_got_the_number_is_looked_at():
    # A layer's ``id`` may come again; what was kept says of which layer it is.
    layer = Layer()
    for _ in range(3):
        layer.computed()
    (known,) = layer.patch.picks.prepared.values()
    assert known.holds_for(layer.module)
    other = layer.model.model.layers[1].self_attn
    assert not known.holds_for(other)
