"""With ``loss_weights="token"`` the loss is ``sum(weight * cross entropy) / tokens in the loss``, or an error says why.
ms-swift computes the same from its ``loss_scale``. The reference is written by hand, of a padded batch.
"""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from small_models import alone, llama, of_family, own_forward, patched, refusal, with_gradients
from test_document_loss import SEVERAL, TEMPLATE, assert_same, without_logits
from torch.nn.functional import cross_entropy

import fa2patch
from fa2patch.packing import passes

Batch = dict[str, Any]


def features(first: int | None = None) -> list[Batch]:
    # Weights are fractions, 0, some above 1 and negative ones, as advantages are. A third of the labels is ignored, and
    # so are all of one document. All examples begin with the token ``first``.
    generator = torch.Generator().manual_seed(0)
    found = []
    for number, doc in enumerate(SEVERAL):
        weights = 3 * torch.rand(len(doc), generator=generator) - 0.5
        weights[1::4] = 0
        labels = doc.clone()
        labels[: len(doc) if number == 2 else len(doc) // 3] = -100
        ids = doc.tolist() if first is None else [first, *doc.tolist()[1:]]
        found.append({"input_ids": ids, "labels": labels.tolist(), "loss_weights": weights.tolist()})
    return found


def padded_by_hand(model: Any, examples: list[Batch], divisor: float | None = None) -> Any:
    # The loss and gradients of one padded batch of the unpatched model.
    longest = max(len(one["input_ids"]) for one in examples)

    def filled(name: str, value: float) -> torch.Tensor:
        return torch.tensor([one[name] + [value] * (longest - len(one["input_ids"])) for one in examples])

    ids, labels, weights = filled("input_ids", 0), filled("labels", -100), filled("loss_weights", 0.0)
    mask = torch.tensor([[1] * len(one["input_ids"]) + [0] * (longest - len(one["input_ids"])) for one in examples])
    labels, weights = labels[:, 1:], weights[:, 1:]
    labels = labels.masked_fill(weights == 0, -100)
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    losses = cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
    counted = int((labels != -100).sum()) if divisor is None else divisor
    return with_gradients(model, (weights * losses).sum() / counted)


def weighted(**options: Any) -> Any:
    return fa2patch.DataCollatorWithFlattening(loss_weights="token", **options)


def completions(padding_free: bool, by: str = "token") -> Any:
    tokenizer = types.SimpleNamespace(pad_token_id=0, padding_side="right")
    return fa2patch.DataCollatorForCompletionOnlyLM(
        [TEMPLATE], tokenizer=tokenizer, padding_free=padding_free, loss_weights=by
    )


def test_the_loss_of_packed_rows() -> None:
    model, examples = llama(), features()
    expected = padded_by_hand(model, examples)
    fa2patch.apply(model)
    ordinary = fa2patch.DataCollatorWithFlattening()([{**one, "loss_weights": None} for one in examples])
    assert abs(float(model(**ordinary).loss.detach()) / float(expected[0]) - 1) > 1e-2, "the weights matter"
    batches = {
        "position ids": weighted()(examples),
        "lengths": weighted(return_flash_attn_kwargs=True, return_seq_idx=True)(examples),
        "padding": weighted(pad_to_multiple_of=16)(examples),
        "no first label is the collator's": weighted(separator_id=None)(examples),
        "with an empty one": weighted()([*examples, {"input_ids": []}]),
    }
    for what, batch in batches.items():
        assert_same(with_gradients(model, model(**batch).loss), expected, what)


def test_weights_of_one_are_the_ordinary_loss_and_weights_of_zero_are_a_mask() -> None:
    model = patched()
    examples = [{**one, "loss_weights": [1] * len(one["input_ids"])} for one in features()]
    plain = [{**one, "loss_weights": None} for one in examples]
    torch.testing.assert_close(
        model(**weighted()(examples)).loss, model(**fa2patch.DataCollatorWithFlattening()(plain)).loss
    )
    for one, other in zip(examples, plain):
        one["loss_weights"] = other["completion_mask"] = [at % 2 for at in range(len(one["input_ids"]))]
    masked = fa2patch.DataCollatorWithFlattening(loss_masks=("completion_mask",))(plain)
    torch.testing.assert_close(model(**weighted()(examples)).loss, model(**masked).loss)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("padding_free", [False, True])
def test_the_loss_of_completions(padding_free: bool, packed: bool) -> None:
    model, examples = llama(), features(TEMPLATE)
    expected = padded_by_hand(model, examples)
    batch = dict(completions(padding_free)(examples))
    fa2patch.apply(model, **({"padded_batches": True} if packed else {}))
    assert_same(with_gradients(model, model(**batch).loss), expected)


def test_trainers_count_tokens_over_batches_of_different_sizes() -> None:
    model, examples = llama(), features()
    expected = padded_by_hand(model, examples)
    batches = [weighted()(examples[:1]), weighted()(examples[1:])]
    items = sum((batch["labels"] != -100).sum() for batch in batches)
    assert int(items) == sum(int((batch["labels"][..., 1:] != -100).sum()) for batch in batches)  # as 5.23 counts
    fa2patch.apply(model)
    for given in (items, int(items)):
        losses = [model(**batch, num_items_in_batch=given).loss for batch in batches]
        assert_same(with_gradients(model, sum(losses)), expected)


@pytest.mark.parametrize("by", ["token", "document"])
@pytest.mark.parametrize("counted", [False, True])
def test_gradients_of_passes_add_up(by: str, counted: bool) -> None:
    # A mean over a pass is weighed by what it is a mean of: tokens, or documents.
    model, examples = patched(), features()
    examples = examples if by == "token" else [{**one, "loss_weights": None} for one in examples]
    collate = fa2patch.DataCollatorWithFlattening(loss_weights=by, return_flash_attn_kwargs=True)
    batch = collate(examples)
    expected = with_gradients(model, model(**batch).loss)
    cut = passes(batch, max_tokens=12)
    assert len(cut) > 2
    items = (batch["labels"] != -100).sum()
    losses = []
    for row, share in zip(cut, cut.shares):
        if (row["labels"] != -100).any():
            loss = model(**row, num_items_in_batch=items).loss if counted else model(**row).loss * share
            losses.append(loss)
    assert_same(with_gradients(model, sum(losses)), expected)


@pytest.mark.parametrize("by", ["token", "document"])
def test_gradients_of_passes_of_a_padded_batch_add_up(by: str) -> None:
    model, examples = llama(), features(TEMPLATE)
    examples = examples if by == "token" else [{**one, "loss_weights": None} for one in examples]
    batch = dict(completions(False, by)(examples))
    fa2patch.apply(model, padded_batches=True)
    expected = with_gradients(model, model(**batch).loss)
    cut = passes(batch, max_tokens=12)
    assert len(cut) > 2 and cut[-1]["loss_weights"].shape == cut[-1]["input_ids"].shape
    losses = [model(**row).loss * share for row, share in zip(cut, cut.shares) if share]
    assert_same(with_gradients(model, sum(losses)), expected)


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_forward_of_another_package_is_right_or_refused(order: str) -> None:
    # Forwards of Liger and others are right if the patch came later, and they return logits.
    model, examples = llama(), features()
    expected = padded_by_hand(model, examples)
    if order == "after":
        fa2patch.apply(model)
    model.forward = types.MethodType(own_forward, model)
    if order == "before":
        fa2patch.apply(model)
        assert_same(with_gradients(model, model(**weighted()(examples)).loss), expected)
    else:
        with refusal("does not compute a causal LM's loss", fa2patch.errors.BadBatch):
            model(**weighted()(examples))


def test_the_output_keeps_its_logits_and_verify_takes_the_batch() -> None:
    model = llama()
    examples = features()
    expected = alone(model, SEVERAL).logits
    fa2patch.apply(model)
    torch.testing.assert_close(model(**weighted()(examples)).logits[0], expected)
    assert fa2patch.verify(model, batch=weighted()(examples)).ok


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])  # GPT-2 shifts labels in its own code; Mixtral has experts
def test_other_models_have_the_same_loss(family: str) -> None:
    model = of_family(family)
    expected = padded_by_hand(model, features())
    fa2patch.apply(model)
    assert_same(with_gradients(model, model(**weighted()(features())).loss), expected)


def test_what_computes_another_loss_is_refused() -> None:
    model = llama()
    with pytest.raises((IndexError, TypeError)):  # not patched: the keyword, or the label, which is no token
        model(**weighted()(features()))
    model = patched()
    with refusal("came without labels. label_smoothing_factor", fa2patch.errors.BadBatch):
        model(**{**weighted()(features()), "labels": None})
    with refusal("with fused_lm_head=True", fa2patch.errors.BadBatch):
        model(**weighted()(features()), fused_lm_head=True)
    model = llama()
    model.forward = types.MethodType(without_logits, model)
    fa2patch.apply(model)
    with refusal("need logits.*TRL's fused head", fa2patch.errors.BadBatch):
        model(**weighted()(features()))


def test_weights_that_no_collator_has_prepared_are_refused() -> None:
    # Many forwards take any keyword, so that weights beside ordinary labels would change nothing.
    batch = fa2patch.DataCollatorWithFlattening()(features())
    assert "loss_weights" in batch  # a column like any other one
    with refusal('loss_weights.*loss_weights="token"', fa2patch.errors.BadBatch):
        patched()(**batch)
    batch = weighted()(features())
    with refusal('came with labels of tokens.*loss_weights="token"', fa2patch.errors.BadBatch):
        patched()(**{**batch, "labels": batch["loss_labels"]})
