"""Padded batches computed packed, equal prefixes of rows once, with the outputs of the padded batch."""

from __future__ import annotations

import contextlib
import copy
import pickle
import sys
from typing import Any

import pytest
import torch
from classification_cases import build
from equality import assert_equal
from padded_cases import assert_near, gradients, layers_tokens

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.check.reads import counted
from fa2patch.documents import tensors
from fa2patch.errors import NotAModel
from fa2patch.patch.padding import pack_padded_batches
from fa2patch.proof.runs import Rounded

SYSTEM, FIRST, SECOND = torch.arange(5, 25), torch.arange(30, 50), torch.arange(50, 75)
GROUPS = ((FIRST, (3, 9, 1)), (SECOND, (4, 12)))


def batch_of(left: bool = True, groups: Any = GROUPS) -> dict[str, torch.Tensor]:
    # The prompts of a group have a common beginning. Prompts are padded left, and completions right.
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.cat([SYSTEM, own]) for own, lengths in groups for _ in lengths]
    ends = [torch.randint(3, 90, (length,), generator=generator) for _, lengths in groups for length in lengths]
    widths = max(map(len, prompts)), max(map(len, ends))
    ids, mask = (torch.zeros(len(ends), sum(widths), dtype=torch.long) for _ in range(2))
    for row, (prompt, end) in enumerate(zip(prompts, ends)):
        at = widths[0] - len(prompt) if left else 0
        whole = torch.cat([prompt, end])
        ids[row, at : at + len(whole)] = whole
        mask[row, at : at + len(whole)] = 1
    return {"input_ids": ids, "attention_mask": mask}


TREE = 20 + 20 + 25 + 3 + 9 + 1 + 4 + 12
ALONE = sum(20 + len(own) + length for own, lengths in GROUPS for length in lengths)


def weights_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    # The gradients of the real tokens are random, so that each row gives another gradient to what it shares.
    generator = torch.Generator().manual_seed(2)
    mask = batch["attention_mask"]
    return torch.randn(*mask.shape, 1, generator=generator) * mask[..., None]


FAMILIES = ("llama", "mixtral", "falcon", "gemma2")


@pytest.mark.parametrize(
    ("family", "left"),
    [(family, left) for family in FAMILIES for left in (True, False)]
    + [("gpt2", False), ("jamba", False)],  # GPT-2 counts padding on the left as positions, Jamba's mixers see it
)
def test_outputs_and_gradients_are_the_padded_ones(family: str, left: bool) -> None:
    # The gradient of shared tokens is the sum over the rows that have them.
    eager = family == "gemma2"
    # eager attention of padding on the left is NaN in float64: its softmax is in float32, which has no such mask
    model = tiny_models.build(family, "eager" if eager else "sdpa", torch.float32 if eager else torch.float64)
    batch = batch_of(left)
    weights = weights_of(batch).to(model.dtype)
    real = batch["attention_mask"] != 0

    def computed_padded() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        logits = model(**batch, use_cache=False).logits
        return {"logits": logits[real]}, gradients(model, (logits * weights).sum())

    outputs, wanted = computed_padded()
    with Rounded() if eager else contextlib.nullcontext():
        moved = computed_padded() if eager else (None, None)
    fa2patch.apply(model)
    seen = layers_tokens(model)
    pack_padded_batches(model, share_prompts=True)
    after = model(**batch, output_hidden_states=True, use_cache=False)
    assert seen == [TREE]
    assert after.logits.shape[:2] == real.shape
    assert_equal({"logits": after.logits[real]}, outputs, moved[0])
    assert {tuple(hidden.shape[:2]) for hidden in after.hidden_states} == {tuple(real.shape)}
    assert all(bool((hidden[~real] == 0).all()) for hidden in after.hidden_states)
    assert_equal(gradients(model, (after.logits * weights).sum()), wanted, moved[1])


@pytest.fixture
def model() -> Any:
    return tiny_models.build("llama", "sdpa")


def computed(model: Any, call: dict[str, Any], share: bool = True) -> tuple[torch.Tensor, int]:
    # Returns the logits and the number of tokens that the layers computed.
    fa2patch.apply(model)
    seen = layers_tokens(model)
    with pack_padded_batches(model, share):
        logits = model(**call, use_cache=False).logits
    return logits, seen[-1]


def test_rows_without_padding(model: Any) -> None:
    batch = batch_of(groups=((FIRST, (6, 6, 6)),))
    expected = model(**batch).logits
    logits, tokens = computed(model, batch)
    assert tokens == 40 + 3 * 6
    assert torch.allclose(logits, expected, atol=1e-4)
    assert computed(model, batch, share=False)[1] == batch["input_ids"].numel()
    other = {**batch, "input_ids": torch.randperm(3 * 46).view(3, 46) % 89 + 3}
    assert computed(model, other)[1] == 3 * 46  # left alone: no padding, and nothing in common


def test_equal_rows_and_rows_that_begin_others(model: Any) -> None:
    batch = batch_of(left=False, groups=((FIRST, (5, 5)), (SECOND, (9,))))
    for name in batch:
        batch[name][1] = batch[name][0]
        batch[name] = torch.cat([batch[name], batch[name][:1]])
    batch["attention_mask"][3, 30:] = 0
    real = batch["attention_mask"] != 0
    expected = model(**batch).logits
    wanted = gradients(model, (expected * weights_of(batch)).sum())
    logits, tokens = computed(model, batch)
    assert tokens == 20 + 20 + 5 + 25 + 9
    assert torch.allclose(logits[real], expected[real], atol=1e-4)
    assert_near(gradients(model, (logits * weights_of(batch)).sum()), wanted)


def test_one_row_and_few_tokens_in_common(model: Any) -> None:
    one = {name: value[:1] for name, value in batch_of().items()}
    assert computed(model, one)[1] == int(one["attention_mask"].sum())
    few = {name: value[:, 5 + 40 - 10 :] for name, value in batch_of(groups=((FIRST, (3, 9)),)).items()}
    assert computed(model, few)[1] == int(few["attention_mask"].sum())


def test_position_ids_and_token_types_stop_the_sharing(model: Any) -> None:
    batch = batch_of(left=False, groups=((FIRST, (5, 9, 7)),))
    ids = torch.arange(batch["input_ids"].shape[1]).repeat(3, 1)
    assert computed(model, {**batch, "position_ids": ids[:1]})[1] == 40 + 5 + 9 + 7
    ids[1] += 2
    expected = model(**batch, position_ids=ids, use_cache=False).logits
    logits, tokens = computed(model, {**batch, "position_ids": ids})
    assert tokens == 40 + 5 + 7 + 49
    real = batch["attention_mask"] != 0
    assert torch.allclose(logits[real], expected[real], atol=1e-4)

    gpt = tiny_models.build("gpt2", "sdpa")
    types = torch.zeros_like(ids)
    types[2, 30:] = 1
    expected = gpt(**batch, token_type_ids=types, use_cache=False).logits
    logits, tokens = computed(gpt, {**batch, "token_type_ids": types})
    assert tokens == 30 + (10 + 5) + (10 + 9) + (10 + 7)  # ten more of two rows are below LEAST
    assert torch.allclose(logits[real], expected[real], atol=1e-4)


def test_embeddings_are_not_compared(model: Any) -> None:
    batch = batch_of()
    embedded = model.get_input_embeddings()(batch["input_ids"])
    assert computed(model, {"inputs_embeds": embedded, "attention_mask": batch["attention_mask"]})[1] == ALONE


@pytest.mark.parametrize("family", ["bert:masked", "roberta:masked"])
def test_models_that_see_later_tokens_do_not_share(family: str) -> None:
    # RoBERTa counts positions from 2. Its padded batches without position ids were packed with ids from 0.
    model = tiny_models.build(family, "sdpa")
    batch = batch_of(left=False)
    batch["input_ids"] += (1 - batch["attention_mask"]) * model.config.pad_token_id
    expected = model(**batch).logits
    fa2patch.apply(model)
    seen = layers_tokens(model)
    pack_padded_batches(model, share_prompts=True)
    real = batch["attention_mask"] != 0
    assert torch.allclose(model(**batch).logits[real], expected[real], atol=1e-4)
    assert seen[-1] == ALONE


@pytest.mark.parametrize(("limit", "shares"), [(41, False), (20, True), (64, True)])
def test_longrope_shares_on_one_side_of_its_limit(limit: int, shares: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=128, original_max_position_embeddings=limit,
        rope_scaling={
            "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 2.0,
            "original_max_position_embeddings": limit,
        },
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    batch = batch_of(groups=((FIRST, (1, 9)), (SECOND, (9,))))
    documents = [row[mask != 0][None] for row, mask in zip(*batch.values())]
    expected = torch.cat([model(each, use_cache=False).logits[0] for each in documents])
    logits, tokens = computed(model, batch)
    assert torch.allclose(logits[batch["attention_mask"] != 0], expected, atol=1e-4)
    assert tokens == (20 + 20 + 1 + 9 + 25 + 9 if shares else sum(each.shape[1] for each in documents))


def test_the_base_model_is_called(model: Any) -> None:
    # TRL's losses with Liger's kernels call the base model, and compute the logits themselves.
    batch = batch_of()
    real = batch["attention_mask"] != 0
    expected = model.model(**batch, use_cache=False).last_hidden_state[real]
    fa2patch.apply(model)
    seen = layers_tokens(model)
    pack_padded_batches(model, share_prompts=True)
    assert torch.allclose(model.model(**batch).last_hidden_state[real], expected, atol=1e-4)
    assert torch.allclose(model.model(**batch, return_dict=False)[0][real], expected, atol=1e-4)
    assert seen == [TREE] * 2


@pytest.mark.parametrize("share", [False, True])
def test_what_is_left_alone(model: Any, share: bool) -> None:
    fa2patch.apply(model)
    seen = layers_tokens(model)
    batch = batch_of(groups=((FIRST, (6, 6)),))
    ids, mask = batch.values()
    gaps = mask.clone()
    gaps[0, 30] = 0
    packed = torch.arange(23).repeat(2)[None].expand(2, -1)
    calls: list[dict[str, Any]] = [
        {"input_ids": ids},
        {"input_ids": ids, "attention_mask": gaps},
        {"input_ids": ids, "attention_mask": mask, "use_cache": True},
        {"input_ids": ids, "attention_mask": mask, "position_ids": packed, "use_cache": False},
        {"input_ids": ids.view(1, -1), "position_ids": packed.reshape(1, -1)},
    ]
    if not share:
        calls.append({"input_ids": ids, "attention_mask": mask})
        assert mask.all(), "there is no padding to leave out"
    expected = [model(**call).logits for call in calls]
    seen.clear()
    pack_padded_batches(model, share)
    for call, before in zip(calls, expected):
        assert torch.equal(model(**call).logits, before)
    assert torch.equal(model.model(**calls[3])[0], model.model(**calls[3])[0])
    assert seen == [ids.numel()] * (len(calls) + 2)


def labelled(left: bool) -> dict[str, torch.Tensor]:
    # All tokens of a row but its first 40 have labels.
    batch = batch_of(left)
    learned = batch["attention_mask"] * batch["attention_mask"].cumsum(1) > 40
    return {**batch, "labels": batch["input_ids"].where(learned, torch.tensor(-100))}


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_loss_tuples_and_the_end_of_packing(model: Any, left: bool) -> None:
    batch = labelled(left)
    before = model(**batch)
    wanted = gradients(model, before.loss)
    fa2patch.apply(model)
    seen = layers_tokens(model)
    real = batch["attention_mask"] != 0
    with pack_padded_batches(model):
        after = model(**batch, output_hidden_states=True)
        assert seen == [ALONE] == [int(real.sum())]
        assert after.logits.shape == before.logits.shape
        assert torch.allclose(after.logits[real], before.logits[real], atol=1e-4)
        assert torch.allclose(after.loss, before.loss, rtol=1e-5)
        assert {tuple(hidden.shape[:2]) for hidden in after.hidden_states} == {tuple(real.shape)}
        assert_near(gradients(model, after.loss), wanted, 2e-5)
        assert torch.equal(model(**batch, return_dict=False)[1], after.logits)
    assert torch.equal(model(**batch).logits, before.logits)
    assert seen[-1] == real.numel()


def test_mixture_of_experts_router_logits() -> None:
    # Upstream takes the batch's mask for the balancing loss, so router logits come back padded too.
    model = tiny_models.build("mixtral", "sdpa")
    batch = labelled(left=False)
    before = model(**batch, output_router_logits=True)
    fa2patch.apply(model)
    pack_padded_batches(model)
    after = model(**batch, output_router_logits=True)
    assert torch.allclose(after.aux_loss, before.aux_loss, rtol=1e-5)
    assert torch.allclose(after.loss, before.loss, rtol=1e-5)


def test_generate(model: Any) -> None:
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    prompts = {name: value[:, :45] for name, value in batch_of().items()}
    expected = model.generate(**prompts, **options)
    fa2patch.apply(model)
    pack_padded_batches(model)
    for more in ({}, {"use_cache": False}):
        assert torch.equal(model.generate(**prompts, **options, **more), expected)


def test_classifier_reverted_model_and_copy() -> None:
    model = build("llama", "SequenceClassification", num_labels=1)
    batch = batch_of(left=False)
    before = model(**batch).logits
    patch = fa2patch.apply(model)
    pack_padded_batches(model)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    seen = layers_tokens(copied)
    assert torch.allclose(copied(**batch).logits, before, atol=1e-4)
    assert seen == [ALONE]
    patch.revert()
    assert torch.equal(model(**batch).logits, before)


def test_not_patched(model: Any) -> None:
    with pytest.raises(NotAModel, match="expected a patched model"):
        pack_padded_batches(model)


@pytest.mark.parametrize(("share", "tokens"), [(False, ALONE), (True, TREE)])
def test_under_peft_and_checkpointing(model: Any, share: bool, tokens: int) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(model, config)
    batch = batch_of()
    weights = weights_of(batch)
    before = wrapped(**batch, use_cache=False).logits
    wanted = gradients(wrapped, (before * weights).sum())
    with wrapped.disable_adapter(), torch.no_grad():
        reference = wrapped(**batch, use_cache=False).logits
    fa2patch.apply(wrapped)
    pack_padded_batches(wrapped, share)
    seen = layers_tokens(model)
    real = batch["attention_mask"] != 0
    with wrapped.disable_adapter(), torch.no_grad():
        assert torch.allclose(wrapped(**batch, use_cache=False).logits[real], reference[real], atol=1e-4)
    assert set(seen) == {tokens}
    wrapped.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    wrapped.train()
    after = wrapped(**batch, use_cache=False).logits
    assert_near(gradients(wrapped, (after * weights).sum()), wanted)
    assert seen[-1] == tokens


@pytest.mark.parametrize(("share", "of_the_row"), [(False, []), (True, ["_read_with"])])
def test_reads_of_the_device(model: Any, monkeypatch: pytest.MonkeyPatch, share: bool, of_the_row: list[str]) -> None:
    # The numbers of reads do not depend on the rows: one by the causal LM, which looks for documents in the mask, one
    # for the rows and what they have in common, and one for a tree's segments.
    fa2patch.apply(model, prove=False)
    pack_padded_batches(model, share)
    model(**batch_of(), use_cache=False)  # a kernel is tried before its first use
    seen: list[tuple[str, int]] = []
    read = tensors.read

    def noted(tensor: torch.Tensor) -> Any:
        reader = sys._getframe(1).f_code.co_name
        # assertions, which are made on the device elsewhere
        if reader not in ("require_here", "_lengths_of", "_agreement", "_is_of_ones"):
            seen.append((reader, tensor.numel()))
        return read(tensor)

    monkeypatch.setattr(tensors, "read", noted)
    for groups in (GROUPS, GROUPS * 3):
        seen.clear()
        batch = batch_of(groups=groups)
        with counted(packages=("fa2patch",)) as count:
            model(**batch, use_cache=False)
        rows = len(batch["input_ids"])
        assert [reader for reader, _ in seen] == ["_from_sources", "read_rows", *of_the_row]
        assert seen[1][1] == 2 * rows + 3 + (rows**2 if share else 0)
        assert count.reads + count.kernel == len(seen), count.where
