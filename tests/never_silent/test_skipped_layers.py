"""A layer that a forward has skipped is not one that was missed (``layerdrop``); one that was missed still is."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from small_models import DOCS, Result, alone, assert_right, called, class_of, labelled, llama, small

import fa2patch
from fa2patch.errors import Fa2PatchError, PackingNotIsolated
from fa2patch.patch import examining
from fa2patch.upstream import forward

LAYERS = 4
SIZES = {
    "vocab_size": 97, "max_position_embeddings": 64, "layerdrop": 0.5, "pad_token_id": 0, "activation_dropout": 0.0,
}  # fmt: skip
# These models have ``layerdrop``, and no other dropout.
DROPPING = {
    "OPT": {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": LAYERS,
            "num_attention_heads": 4, "dropout": 0.0, "attention_dropout": 0.0},
    "BioGpt": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
               "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "XGLM": {"d_model": 32, "ffn_dim": 48, "num_layers": LAYERS, "attention_heads": 4, "dropout": 0.0,
             "attention_dropout": 0.0},
}  # fmt: skip


@pytest.fixture(autouse=True)
def drawn(monkeypatch):
    # Every forward skips the same layers, the second and the fourth. Each draws one number for a layer.
    numbers, rand = itertools.cycle([0.9, 0.1]), torch.rand

    def drawn_or_random(*args, **kwargs):
        return torch.tensor(next(numbers)) if args == ([],) else rand(*args, **kwargs)

    monkeypatch.setattr(torch, "rand", drawn_or_random)


def dropping(name):
    # The model skips layers in training, and has no other dropout.
    return small(class_of(f"{name}ForCausalLM"), class_of(f"{name}Config")(**SIZES, **DROPPING[name])).train()


def blocks(model):
    return next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))


class Counted:
    def __init__(self, model):
        self.ran = 0
        for block in blocks(model):
            block.register_forward_pre_hook(self)

    def __call__(self, module, args):
        self.ran += 1


def applied(model):
    try:
        return fa2patch.apply(model, prove=False)
    except Fa2PatchError as error:
        pytest.skip(f"refused by apply: {error.message[:80]}")


def test_ids_that_a_forward_changes_in_place_are_its_own_when_it_is_repeated(monkeypatch):
    # As XGLM's up to 4.49. The first batch reaches every layer, the second one drops one.
    model, missing = llama().eval(), iter([True, True])
    expected, patch = alone(model), applied(model)

    def changing(module, args, kwargs, output):
        kwargs["position_ids"].add_(2)

    blocks(model)[-1].register_forward_hook(changing, with_kwargs=True)
    assert_right(called(model, labelled(use_cache=False)), Result(expected.logits))
    assert patch.vouched and patch.changes_ids
    monkeypatch.setattr(forward, "_misses", lambda step, mask, ran: ran is None and next(missing))
    assert_right(called(model, labelled(use_cache=False)), Result(expected.logits))


@pytest.mark.parametrize("name", DROPPING)
def test_layerdrop(name):
    model = dropping(name)
    counted = Counted(model)
    expected = alone(model)
    assert 0 < counted.ran < len(DOCS) * LAYERS
    if name == "XGLM":  # up to 4.49 its loss has a padding token behind every row
        expected = Result(expected.logits)
    applied(model)
    for _ in range(2):
        assert_right(called(model, labelled(use_cache=False)), expected)


@pytest.mark.parametrize("what", ["every layer is skipped", "with checkpointing"])
def test_layerdrop_otherwise(what):
    model = dropping("OPT")
    if what == "every layer is skipped":
        model.model.decoder.layerdrop = 1.0
    expected = alone(model)
    applied(model)
    if what == "with checkpointing":
        model.gradient_checkpointing_enable()
    assert_right(called(model, labelled(use_cache=False)), expected)


def test_nothing_stays_on_the_layers():
    model = dropping("OPT")
    before = [list(module._forward_pre_hooks) for module in blocks(model).modules()]
    with applied(model):
        model(**labelled(use_cache=False))
        assert [list(module._forward_pre_hooks) for module in blocks(model).modules()] == before


class Gate(torch.nn.Module):
    # A user's own code skips the block.

    def __init__(self, block):
        super().__init__()
        self.block, self.on = block, True

    def __getattr__(self, name):  # layer_type, attention_type: upstream reads them from a block
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["block"], name)

    def forward(self, hidden, *args, **kwargs):
        if self.on:
            return self.block(hidden, *args, **kwargs)
        return hidden if self.bare else (hidden,)


def gated():
    model = llama(use_cache=False)
    layers = model.model.layers
    with torch.no_grad():
        output = {}
        layers[0].register_forward_hook(lambda module, args, found: output.update(bare=torch.is_tensor(found)))
        model(DOCS[0][None])
    for at, block in enumerate(layers):
        layers[at] = Gate(block)
        layers[at].bare = output["bare"]
    return model


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_block_that_a_users_own_code_skips(mode):
    model = gated()
    getattr(model, mode)()
    fa2patch.apply(model, prove=False)
    for on in (True, False, True):
        model.model.layers[1].on = on
        plain = copy.deepcopy(model)
        fa2patch.revert(plain)
        expected = alone(plain)
        assert_right(called(model, labelled(use_cache=False)), expected)


def past_every_seam(model, layer):
    # The attention layer gets a forward that mixes tokens by itself.
    outputs = []
    handle = layer.register_forward_hook(lambda module, args, found: outputs.append(len(found)))
    model(DOCS[0][None])
    handle.remove()

    def forward(hidden_states, *args, **kwargs):
        return (layer.o_proj(hidden_states.cumsum(1)), *[None] * (outputs[0] - 1))

    layer.forward = forward


@pytest.mark.parametrize("before", ["nothing was skipped", "a layer was skipped"])
def test_a_layer_that_was_missed_is_named(before):
    # The layer is named also in a model that skips layers, in the block that runs.
    model = gated()
    patch = fa2patch.apply(model, prove=False)
    if before == "a layer was skipped":
        model.model.layers[0].on = False
        model(**labelled(use_cache=False))
        assert patch.skips
    layer = model.model.layers[1].block.self_attn
    past_every_seam(model, layer)
    patch.renew = lambda: None  # the patch would notice the new forward; here it only counts
    examining.keep_structure(patch)
    attended = len(blocks(model)) - 1 - (before == "a layer was skipped")
    for _ in range(2):
        with pytest.raises(
            PackingNotIsolated, match=rf"only {attended} were given.*not [a-z.]*layers\.1\.block\.self_attn"
        ):
            model(**labelled(use_cache=False))
