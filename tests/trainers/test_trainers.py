"""Which models of a trainer compute their padded batches packed; ``tests/integrations/test_trl.py`` has TRL's own."""

from __future__ import annotations

import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from padded_cases import layers_tokens

import fa2patch
from compat_matrix import tiny_models
from fa2patch.errors import BadArgument, LayerNotPatchable, StaysPadded
from fa2patch.padded.batches import PaddedBatches
from fa2patch.trainers.packed_trainer import pack_models
from fa2patch.upstream.step import PADDING


def test_no_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(fa2patch.errors.Fa2PatchError, match="pip install trl"):
        fa2patch.packed_trainer()


class Trainer:
    # It has the arguments of TRL's trainers, and a padding-free option. The slow tests use TRL's own trainers.

    def __init__(self, model: Any, ref_model: Any = None, **options: Any) -> None:
        self.args = SimpleNamespace(**options)
        self.model, self.ref_model = model, ref_model
        self.padding_free = options.get("padding_free", False)


class ValueHead(torch.nn.Module):
    # A wrapper that is no Transformers model, around one that is.

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.pretrained_model, self.v_head = model, torch.nn.Linear(2, 1)


def llama() -> Any:
    return tiny_models.build("llama", "sdpa")


def fnet() -> Any:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 32}
    return transformers.FNetForMaskedLM(transformers.FNetConfig(**sizes))


def packing(model: Any) -> list[PaddedBatches]:
    """What makes a model, or its parts, compute padded batches packed."""
    held = [vars(module).get(PADDING) for module in model.modules()]
    return [found for found in held if isinstance(found, PaddedBatches)]


def test_a_trainer_that_is_no_class() -> None:
    with pytest.raises(BadArgument, match="base: expected a class.*found an object of class Trainer"):
        fa2patch.packed_trainer(Trainer(None))


def test_model_and_reference_are_packed() -> None:
    model, reference = llama(), llama()
    trainer = fa2patch.packed_trainer(Trainer)(model, ref_model=reference)
    assert isinstance(trainer, Trainer)
    assert type(trainer).__name__ == "PackedTrainer"
    assert fa2patch.status(model).active and fa2patch.status(reference).active
    assert len(packing(model)) == len(packing(reference)) == 1
    assert fa2patch.packed_trainer(Trainer)(model, None).ref_model is None
    assert len(packing(model)) == 1, "a second trainer packs it anew, but not twice"


def test_every_model_that_a_trainer_holds_is_packed_once() -> None:
    policy, judges, inner = llama(), [llama(), llama()], llama()
    trainer = SimpleNamespace(
        model=policy, model_wrapped=torch.nn.DataParallel(policy), reward_funcs=[judges[0], len, judges[1]],
        value={"critic": ValueHead(inner)}, name="no model", optimizer=None,
    )  # fmt: skip
    for _ in range(2):
        found = pack_models(vars(trainer))
        assert found.packed.keys() == {"model", "model_wrapped", "reward_funcs[0]", "reward_funcs[1]", "value"}
        assert not found.padded
        assert [len(packing(model)) for model in (policy, *judges, inner)] == [1] * 4
    assert found.packed["model"] is found.packed["model_wrapped"]
    for each in found.packed.values():
        each.remove()
    assert not packing(policy)


def test_a_model_that_the_trainer_gets_later_is_packed() -> None:
    trainer = fa2patch.packed_trainer(Trainer)(llama())
    made = llama()
    trainer.model = made
    assert fa2patch.status(made).active
    assert len(packing(made)) == 1
    fa2patch.revert(made)
    trainer.model = made  # as Trainer does when it unwraps its model
    assert fa2patch.status(made).active and len(packing(made)) == 1


def test_a_model_that_cannot_be_packed() -> None:
    with pytest.raises(LayerNotPatchable, match="looked in every layer"):
        fa2patch.packed_trainer(Trainer)(fnet())
    reference, model = fnet(), llama()
    with pytest.warns(StaysPadded, match=r"Trainer.ref_model stays as it was.*looked in every layer"):
        fa2patch.packed_trainer(Trainer)(model, reference)
    assert not packing(reference) and len(packing(model)) == 1
    found = pack_models({"model": reference, "other": model})
    assert found.packed.keys() == {"other"}
    assert "looked in every layer" in found.padded["model"].message


def test_rows_that_a_trainer_packs_itself_are_refused() -> None:
    with pytest.raises(BadArgument, match="padding_free=True: .*Trainer then makes packed rows itself"):
        fa2patch.packed_trainer(Trainer)(llama(), padding_free=True)
    with pytest.raises(BadArgument, match="packing_strategy='wrapped': .*where texts start.*'bfd'"):
        fa2patch.packed_trainer(Trainer)(llama(), packing=True, packing_strategy="wrapped")


@pytest.mark.parametrize(("share", "tokens"), [(True, 40 + 3 * 5), (False, 3 * 45)])
def test_prompts_are_shared(share: bool, tokens: int) -> None:
    model = llama()
    prompts, ends = torch.arange(5, 45).expand(3, -1), torch.arange(50, 65).view(3, 5)
    ids = torch.cat([torch.zeros(3, 1, dtype=torch.long), prompts, ends], 1)
    fa2patch.packed_trainer(Trainer, share_prompts=share)(model, None)
    seen = layers_tokens(model)
    model(input_ids=ids, attention_mask=(ids != 0).long(), use_cache=False)
    assert seen == [tokens]


IDS = torch.arange(3, 15).view(2, 6)
GAPS = torch.tensor([[1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
PADDED = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ({"attention_mask": GAPS}, "one run of ones"),
        ({"attention_mask": PADDED, "output_attentions": True}, "output_attentions=True"),
        ({"attention_mask": PADDED, "cache_position": torch.arange(6)}, "made a cache_position"),
        ({"attention_mask": PADDED, "position_ids": torch.arange(6).expand(3, 2, 6)}, "position_ids have 3 dimensions"),
        ({"attention_mask": torch.zeros(2, 1, 6, 6)}, "attention_mask has 4 dimensions"),
    ],
    ids=["gaps", "attentions", "cache position", "three axes", "dense mask"],
)
def test_a_batch_that_stays_padded_is_said_once(call: dict[str, Any], why: str) -> None:
    base = tiny_models.build("llama", "eager").model
    fa2patch.packed_trainer(Trainer)(base)
    base.layers = torch.nn.ModuleList()
    with pytest.warns(StaysPadded, match=f"LlamaModel is computed as it came.*{why}"):
        call_quietly(base, input_ids=IDS, use_cache=False, **call)
    with warnings.catch_warnings():
        warnings.simplefilter("error", StaysPadded)
        call_quietly(base, input_ids=IDS, use_cache=False, **call)


def call_quietly(base: Any, **call: Any) -> None:
    # The model's own code may refuse the arguments.
    try:
        base(**call)
    except (ValueError, IndexError, RuntimeError) as error:
        assert "fa2patch" not in type(error).__module__, error


def test_batches_without_padding_or_with_a_cache_are_not_reported() -> None:
    model = llama()
    fa2patch.packed_trainer(Trainer)(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", StaysPadded)
        model(input_ids=IDS)
        model(input_ids=IDS, attention_mask=torch.ones_like(IDS))
        model(input_ids=IDS, attention_mask=PADDED)
        model(input_ids=IDS, attention_mask=GAPS, use_cache=True)
        model(input_ids=IDS.view(1, 12), position_ids=torch.arange(6).repeat(2)[None])
        model.generate(input_ids=IDS, attention_mask=PADDED.flip(1), max_new_tokens=2, do_sample=False, pad_token_id=0)
