"""The loss with ``loss_weights``, or an error that says why not.

With "document" it is the mean of the documents' own losses. With "token" it is the sum of weight times cross entropy,
divided by the tokens in the loss, as ms-swift computes it from its ``loss_scale``. That reference is written by hand,
of a padded batch.
"""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import transformers
from small_models import (
    alone,
    assert_says_enough,
    class_of,
    llama,
    of_family,
    own_forward,
    patched,
    refusal,
    with_gradients,
)
from torch.nn.functional import cross_entropy

import fa2patch
from compat_matrix.check.rows import documents
from fa2patch.packing import passes

BOTH = ("document", "token")
of_both = pytest.mark.parametrize("by", BOTH)

# The document of :data:`SEVERAL` whose labels are all ignored.
NO_LABELS = 2

SEVERAL = documents(5, 9, 3, 7, 1, 6)
CLOSE = 1e-6
# The ordinary loss is so far from the weighted one.
MATTERS = {"document": 1e-3, "token": 1e-2}
TEMPLATE = 2

Batch = dict[str, Any]


def features(by: str, first: int | None = None) -> list[Batch]:
    # The first half of each document's labels is ignored, or the first third. Weights of tokens are fractions, 0, some
    # above 1 and negative ones, as advantages are. All examples begin with the token ``first``.
    generator = torch.Generator().manual_seed(0)
    found = []
    for number, doc in enumerate(SEVERAL):
        labels = doc.clone()
        labels[: len(doc) if number == NO_LABELS else len(doc) // (2 if by == "document" else 3)] = -100
        ids = doc.tolist() if first is None else [first, *doc.tolist()[1:]]
        found.append({"input_ids": ids, "labels": labels.tolist()})
        if by == "token":
            weights = 3 * torch.rand(len(doc), generator=generator) - 0.5
            weights[1::4] = 0
            found[-1]["loss_weights"] = weights.tolist()
    return found


def without_weights(examples: list[Batch]) -> list[Batch]:
    return [{"input_ids": one["input_ids"], "labels": one["labels"]} for one in examples]


def one_by_one(model: Any, examples: list[Batch]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    # Each loss is a document's own mean, of the documents that have labels behind their first token.
    losses = []
    for example in examples:
        ids, labels = torch.tensor([example["input_ids"]]), torch.tensor(example["labels"][1:])
        if (labels != -100).any():
            losses.append(cross_entropy(model(input_ids=ids).logits[0, :-1], labels))
    return with_gradients(model, sum(losses) / len(losses))


def padded_by_hand(model: Any, examples: list[Batch]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
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
    return with_gradients(model, (weights * losses).sum() / int((labels != -100).sum()))


EXPECTED = {"document": one_by_one, "token": padded_by_hand}


def weighted(by: str, **options: Any) -> Any:
    return fa2patch.DataCollatorWithFlattening(loss_weights=by, **options)


def completions(by: str, padding_free: bool = False) -> Any:
    # The tokens behind the first one of each document are a completion.
    tokenizer = types.SimpleNamespace(pad_token_id=0, padding_side="right")
    return fa2patch.DataCollatorForCompletionOnlyLM(
        [TEMPLATE], tokenizer=tokenizer, padding_free=padding_free, loss_weights=by
    )


def assert_same(found: Any, expected: Any, what: str = "") -> None:
    (loss, gradients), (right, of_right) = found, expected
    assert abs(float(loss) / float(right) - 1) < CLOSE, (what, float(loss), float(right))
    largest = max(float(one.abs().max()) for one in of_right.values())
    assert gradients.keys() == of_right.keys()
    for name, gradient in of_right.items():
        assert float((gradients[name] - gradient).abs().max()) < CLOSE * largest, (what, name)


def in_rows(by: str, examples: list[Batch], at: int) -> Batch:
    # The shorter of the two packed rows is padded behind its documents. The batch has a mask.
    rows = [dict(weighted(by)(part)) for part in (examples[:at], examples[at:])]
    longest = max(row["input_ids"].shape[1] for row in rows)
    fill = {"labels": -100, "loss_labels": -100}
    batch = {}
    for row in rows:
        row["attention_mask"] = torch.ones_like(row["input_ids"])
    for key in rows[0]:
        missing = [longest - row[key].shape[1] for row in rows]
        padded = [torch.nn.functional.pad(row[key], (0, n), value=fill.get(key, 0)) for row, n in zip(rows, missing)]
        batch[key] = torch.cat(padded)
    return batch


@of_both
def test_the_loss_of_packed_rows(by: str) -> None:
    model, examples = llama(), features(by)
    expected = EXPECTED[by](model, examples)
    fa2patch.apply(model)
    ordinary = fa2patch.DataCollatorWithFlattening()(without_weights(examples))
    assert abs(float(model(**ordinary).loss.detach()) / float(expected[0]) - 1) > MATTERS[by], "the weights matter"
    batches = {
        "position ids": weighted(by)(examples),
        "lengths": weighted(by, return_flash_attn_kwargs=True, return_seq_idx=True)(examples),
        "padding": weighted(by, pad_to_multiple_of=16)(examples),
        "no first label is the collator's": weighted(by, separator_id=None)(examples),
        "with an empty one": weighted(by)([*examples, {"input_ids": []}]),
        "two rows": in_rows(by, examples, 2),
    }
    for what, batch in batches.items():
        assert_same(with_gradients(model, model(**batch).loss), expected, what)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("padding_free", [False, True])
@of_both
def test_the_loss_of_completions(by: str, padding_free: bool, packed: bool) -> None:
    model, examples = llama(), features(by, TEMPLATE)
    expected = EXPECTED[by](model, examples)
    batch = dict(completions(by, padding_free)(examples))
    if by == "document" and not padding_free:
        assert batch["loss_weights"].sum(-1).tolist() == pytest.approx([1, 1, 0, 1, 0, 1])
    fa2patch.apply(model, **({"padded_batches": True} if packed else {}))
    assert_same(with_gradients(model, model(**batch).loss), expected)


@of_both
def test_trainers_count_over_batches_of_different_sizes(by: str) -> None:
    # Trainer from 4.46 on counts labels over all batches of a step, and hands the sum to the model.
    model, examples = llama(), features(by)
    expected = EXPECTED[by](model, examples)
    batches = [weighted(by)(examples[:1]), weighted(by)(examples[1:])]
    items = sum((batch["labels"] != -100).sum() for batch in batches)
    assert by == "token" or int(items) == 4
    assert int(items) == sum(int((batch["labels"][..., 1:] != -100).sum()) for batch in batches)  # as 5.23 counts
    fa2patch.apply(model)
    for given in (items, int(items)):
        losses = [model(**batch, num_items_in_batch=given).loss for batch in batches]
        assert_same(with_gradients(model, sum(losses)), expected)


def test_weights_of_one_are_the_ordinary_loss_and_weights_of_zero_are_a_mask() -> None:
    model = patched()
    examples = [{**one, "loss_weights": [1] * len(one["input_ids"])} for one in features("token")]
    plain = without_weights(examples)
    torch.testing.assert_close(
        model(**weighted("token")(examples)).loss, model(**fa2patch.DataCollatorWithFlattening()(plain)).loss
    )
    for one, other in zip(examples, plain):
        one["loss_weights"] = other["completion_mask"] = [at % 2 for at in range(len(one["input_ids"]))]
    masked = fa2patch.DataCollatorWithFlattening(loss_masks=("completion_mask",))(plain)
    torch.testing.assert_close(model(**weighted("token")(examples)).loss, model(**masked).loss)


@of_both
@pytest.mark.parametrize("counted", [False, True])
def test_gradients_of_passes_add_up(by: str, counted: bool) -> None:
    # A mean over a pass is weighed by what it is a mean of: tokens, or documents.
    model = patched()
    batch = weighted(by, return_flash_attn_kwargs=True)(features(by))
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


@of_both
def test_gradients_of_passes_of_a_padded_batch_add_up(by: str) -> None:
    model = llama()
    batch = dict(completions(by)(features(by, TEMPLATE)))
    fa2patch.apply(model, padded_batches=True)
    expected = with_gradients(model, model(**batch).loss)
    cut = passes(batch, max_tokens=12)
    assert len(cut) > 2 and cut[-1]["loss_weights"].shape == cut[-1]["input_ids"].shape
    losses = [model(**row).loss * share for row, share in zip(cut, cut.shares) if share]
    assert_same(with_gradients(model, sum(losses)), expected)


@of_both
def test_the_output_keeps_its_logits_and_verify_takes_the_batch(by: str) -> None:
    model = llama()
    expected = alone(model, SEVERAL).logits
    fa2patch.apply(model)
    batch = weighted(by)(features(by))
    output = model(**batch)
    assert list(output)[:2] == ["loss", "logits"]
    torch.testing.assert_close(output.logits[0], expected)
    loss, logits = model(**batch, return_dict=False, use_cache=False)[:2]
    assert torch.equal(loss, output.loss)
    assert logits.shape == output.logits.shape
    assert fa2patch.verify(model, batch=batch).ok


@of_both
def test_an_unpatched_model_does_not_train_on_it(by: str) -> None:
    model = llama()
    with pytest.raises((IndexError, TypeError)):  # up to 4.5x: the keyword; later: the label is no token
        model(**weighted(by)(features(by)))
    fa2patch.apply(model).revert()
    with pytest.raises((IndexError, TypeError)):
        model(**weighted(by)(features(by)))


@of_both
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_forward_of_another_package_is_right_or_refused(order: str, by: str) -> None:
    # Forwards of Liger and others are right if the patch came later, and they return logits.
    model, examples = llama(), features(by)
    expected = EXPECTED[by](model, examples)
    if order == "after":
        fa2patch.apply(model)
    model.forward = types.MethodType(own_forward, model)
    if order == "before":
        fa2patch.apply(model)
        assert_same(with_gradients(model, model(**weighted(by)(examples)).loss), expected)
    else:
        with refusal("does not compute a causal LM's loss", fa2patch.errors.BadBatch):
            model(**weighted(by)(examples))


def without_logits(
    self: Any, input_ids: Any = None, position_ids: Any = None, labels: Any = None, **kwargs: Any
) -> Any:
    output = own_forward(self, input_ids=input_ids, position_ids=position_ids, labels=labels, **kwargs)
    return transformers.modeling_outputs.CausalLMOutputWithPast(loss=output.loss)


@of_both
def test_a_fused_loss_without_logits_is_refused(by: str) -> None:
    model = llama()
    model.forward = types.MethodType(without_logits, model)
    fa2patch.apply(model)
    with refusal("need logits.*TRL's fused head", fa2patch.errors.BadBatch):
        model(**weighted(by)(features(by)))


@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("weights", [None, "document"])
def test_a_forward_that_does_not_know_the_arguments_and_is_called_past_the_patch(
    lengths: bool, weights: str | None
) -> None:
    # Forwards of Liger up to 0.5 have no ``**kwargs``, and PEFT up to 0.17 runs ``model.forward(...)``.
    peft = pytest.importorskip("peft")
    model, examples = patched(), features("document")

    def strict(self: Any, input_ids: Any = None, attention_mask: Any = None, inputs_embeds: Any = None,
               position_ids: Any = None, labels: Any = None, output_attentions: Any = None,
               output_hidden_states: Any = None, return_dict: Any = None) -> Any:  # fmt: skip
        return own_forward(self, input_ids=input_ids, position_ids=position_ids, labels=labels)

    options = {} if weights is None else {"loss_weights": weights}
    batch = fa2patch.DataCollatorWithFlattening(return_flash_attn_kwargs=lengths, **options)(examples)
    expected = model(**fa2patch.DataCollatorWithFlattening(**options)(examples)).loss.detach()
    model.forward = types.MethodType(strict, model)
    outer = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    for call in (outer, lambda **given: type(outer).forward(outer, **given)):
        try:
            found = call(**batch).loss
        except fa2patch.Fa2PatchError as error:
            assert_says_enough(error)
        else:
            torch.testing.assert_close(found, expected)


REFUSED = {
    "labels taken out": ({"labels": None}, "came without labels. label_smoothing_factor"),
    "fewer logits": ({"logits_to_keep": 4}, "need all logits, but logits_to_keep"),
    "no weights": ({"loss_weights": None}, "loss_weights: expected one for each"),
    "shifted labels": ({"shift_labels": torch.zeros(1, 31).long()}, "need whole rows"),
    "router": ({"output_router_logits": True}, "router's own loss"),
    "fused head": ({"fused_lm_head": True}, "with fused_lm_head=True"),
}


@of_both
@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_another_loss_is_refused(case: str, by: str) -> None:
    more, message = REFUSED[case]
    model = patched()
    with refusal(message, fa2patch.errors.BadBatch):
        model(**{**weighted(by)(features(by)), **more})


@of_both
@pytest.mark.parametrize("name", ["LlamaModel", "LlamaForTokenClassification"])
def test_heads_that_do_not_predict_the_next_token_are_refused(name: str, by: str) -> None:
    model = patched(llama(class_of(name)))
    with pytest.raises(fa2patch.errors.BadBatch, match=f"came to {name}"):
        model(**weighted(by)(features(by)))


def test_weights_that_no_collator_has_prepared_are_refused() -> None:
    # Many forwards take any keyword, so that weights beside ordinary labels would change nothing.
    batch = fa2patch.DataCollatorWithFlattening()(features("token"))
    assert "loss_weights" in batch  # a column like any other one
    with refusal('loss_weights.*loss_weights="token"', fa2patch.errors.BadBatch):
        patched()(**batch)
    batch = weighted("token")(features("token"))
    with refusal('came with labels of tokens.*loss_weights="token"', fa2patch.errors.BadBatch):
        patched()(**{**batch, "labels": batch["loss_labels"]})


# GPT-2 shifts labels in its own code; Mixtral has experts
@of_both
@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_other_models_have_the_same_loss(family: str, by: str) -> None:
    model = of_family(family)
    expected = EXPECTED[by](model, features(by))
    fa2patch.apply(model)
    assert_same(with_gradients(model, model(**weighted(by)(features(by))).loss), expected)
