"""With ``loss_weights="document"`` the loss is the mean of the documents' own losses, or an error says why not."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import transformers
from small_models import (
    DOCS,
    Result,
    alone,
    assert_right,
    assert_says_enough,
    class_of,
    llama,
    of_family,
    own_forward,
    patched,
    refusal,
    right_or_refused,
    with_gradients,
)
from torch.nn.functional import cross_entropy

import fa2patch
from compat_matrix.check.rows import documents

# The document of :data:`SEVERAL` whose labels are all ignored.
NO_LABELS = 2

SEVERAL = documents(5, 9, 3, 7, 1, 6)
CLOSE = 1e-6
TEMPLATE = 2

Batch = dict[str, Any]


def features(docs: list[torch.Tensor] = SEVERAL, without: int | None = NO_LABELS) -> list[Batch]:
    # The first half of each document's labels is ignored.
    found = []
    for number, doc in enumerate(docs):
        labels = doc.clone()
        labels[: len(doc) if number == without else len(doc) // 2] = -100
        found.append({"input_ids": doc.tolist(), "labels": labels.tolist()})
    return found


def losses_alone(model: Any, examples: list[Batch]) -> list[torch.Tensor]:
    # Each loss is a document's own mean, of the documents that have labels behind their first token.
    found = []
    for example in examples:
        ids, labels = torch.tensor([example["input_ids"]]), torch.tensor(example["labels"][1:])
        if (labels != -100).any():
            found.append(cross_entropy(model(input_ids=ids).logits[0, :-1], labels))
    return found


def one_by_one(model: Any, examples: list[Batch]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    losses = losses_alone(model, examples)
    return with_gradients(model, sum(losses) / len(losses))


def weighted(**options: Any) -> Any:
    return fa2patch.DataCollatorWithFlattening(loss_weights="document", **options)


def assert_same(found: Any, expected: Any, what: str = "") -> None:
    (loss, gradients), (right, of_right) = found, expected
    assert abs(float(loss) / float(right) - 1) < CLOSE, (what, float(loss), float(right))
    largest = max(float(one.abs().max()) for one in of_right.values())
    assert gradients.keys() == of_right.keys()
    for name, gradient in of_right.items():
        assert float((gradients[name] - gradient).abs().max()) < CLOSE * largest, (what, name)


def in_rows(examples: list[Batch], at: int) -> Batch:
    # The shorter of the two packed rows is padded behind its documents. The batch has a mask.
    rows = [dict(weighted()(part)) for part in (examples[:at], examples[at:])]
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


def padded(examples: list[Batch]) -> Batch:
    # The tokens behind the first half of each document are a completion.
    tokenizer = types.SimpleNamespace(pad_token_id=0, padding_side="right")
    collate = fa2patch.DataCollatorForCompletionOnlyLM([TEMPLATE], tokenizer=tokenizer, loss_weights="document")
    template = [{**one, "input_ids": [TEMPLATE, *one["input_ids"][1:]]} for one in examples]
    for one in template:
        one["labels"] = [-100, *one["labels"][1:]]
    return dict(collate(template))


def test_the_loss_is_the_mean_of_the_documents_losses() -> None:
    model, examples = llama(), features()
    expected = one_by_one(model, examples)
    ordinary = fa2patch.DataCollatorWithFlattening()(examples)
    fa2patch.apply(model)
    by_token = float(model(**ordinary).loss.detach())
    assert abs(by_token / float(expected[0]) - 1) > 1e-3  # the documents differ enough to tell
    batches = {
        "position ids": weighted()(examples),
        "lengths": weighted(return_flash_attn_kwargs=True, return_seq_idx=True)(examples),
        "padding": weighted(pad_to_multiple_of=16)(examples),
        "no first label is the collator's": weighted(separator_id=None)(examples),
        "two rows": in_rows(examples, 2),
    }
    for what, batch in batches.items():
        assert_same(with_gradients(model, model(**batch).loss), expected, what)


def test_the_loss_of_a_padded_batch() -> None:
    model, examples = llama(), features()
    for one in examples:
        one["input_ids"][0] = TEMPLATE
    expected = one_by_one(model, examples)
    batch = padded(examples)
    assert batch["loss_weights"].sum(-1).tolist() == pytest.approx([1, 1, 0, 1, 0, 1])
    fa2patch.apply(model)
    assert_same(with_gradients(model, model(**batch).loss), expected)


def test_trainers_count_documents_over_batches_of_different_sizes() -> None:
    # Trainer from 4.46 on counts labels over all batches of a step, and hands the sum to the model.
    model, examples = llama(), features()
    expected = one_by_one(model, examples)
    batches = [weighted()(examples[:1]), weighted()(examples[1:])]
    items = sum((batch["labels"] != -100).sum() for batch in batches)
    assert int(items) == 4
    assert int(items) == sum(int((batch["labels"][..., 1:] != -100).sum()) for batch in batches)  # as 5.23 counts
    fa2patch.apply(model)
    for given in (items, int(items)):
        losses = [model(**batch, num_items_in_batch=given).loss for batch in batches]
        assert_same(with_gradients(model, sum(losses)), expected)


def test_the_output_keeps_its_logits() -> None:
    model = llama()
    expected = alone(model).logits
    fa2patch.apply(model)
    batch = weighted()([{"input_ids": doc.tolist()} for doc in DOCS])
    output = model(**batch)
    assert list(output)[:2] == ["loss", "logits"]
    torch.testing.assert_close(output.logits[0], expected)
    loss, logits = model(**batch, return_dict=False, use_cache=False)[:2]
    assert torch.equal(loss, output.loss)
    assert logits.shape == output.logits.shape


def test_verify_takes_the_batch() -> None:
    model = patched()
    assert fa2patch.verify(model, batch=weighted()(features())).ok


def test_an_unpatched_model_does_not_train_on_it() -> None:
    model = llama()
    with pytest.raises((IndexError, TypeError)):  # up to 4.5x: the keyword; later: the label is no token
        model(**weighted()(features()))
    fa2patch.apply(model).revert()
    with pytest.raises((IndexError, TypeError)):
        model(**weighted()(features()))


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_forward_of_another_package(order: str) -> None:
    model, examples = llama(), features()
    result = Result(model(input_ids=torch.cat(SEVERAL)[None]).logits, *one_by_one(model, examples))
    if order == "after":
        fa2patch.apply(model)
    model.forward = types.MethodType(own_forward, model)
    if order == "before":
        fa2patch.apply(model)
    batch = weighted()(examples)

    def run() -> Result:
        loss, gradients = with_gradients(model, model(**batch).loss)
        return Result(result.logits, loss, gradients)

    said = right_or_refused(run, result)
    assert said == ("right" if order == "before" else "refused: BadBatch")


def without_logits(
    self: Any, input_ids: Any = None, position_ids: Any = None, labels: Any = None, **kwargs: Any
) -> Any:
    output = own_forward(self, input_ids=input_ids, position_ids=position_ids, labels=labels, **kwargs)
    return transformers.modeling_outputs.CausalLMOutputWithPast(loss=output.loss)


def test_a_fused_loss_without_logits_is_refused() -> None:
    model = llama()
    model.forward = types.MethodType(without_logits, model)
    fa2patch.apply(model)
    with refusal("need logits.*TRL's fused head", fa2patch.errors.BadBatch):
        model(**weighted()(features()))


@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("by", ["token", "document"])
def test_a_forward_that_does_not_know_the_arguments_and_is_called_past_the_patch(lengths: bool, by: str) -> None:
    # Forwards of Liger up to 0.5 have no ``**kwargs``, and PEFT up to 0.17 runs ``model.forward(...)``.
    peft = pytest.importorskip("peft")
    model, examples = patched(), features()

    def strict(self: Any, input_ids: Any = None, attention_mask: Any = None, inputs_embeds: Any = None,
               position_ids: Any = None, labels: Any = None, output_attentions: Any = None,
               output_hidden_states: Any = None, return_dict: Any = None) -> Any:  # fmt: skip
        return own_forward(self, input_ids=input_ids, position_ids=position_ids, labels=labels)

    collate = weighted if by == "document" else fa2patch.DataCollatorWithFlattening
    batch = collate(return_flash_attn_kwargs=lengths)(examples)
    expected = model(**collate()(examples)).loss.detach()
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


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_another_loss_is_refused(case: str) -> None:
    more, message = REFUSED[case]
    model = patched()
    with refusal(message, fa2patch.errors.BadBatch):
        model(**{**weighted()(features()), **more})


@pytest.mark.parametrize("name", ["LlamaModel", "LlamaForTokenClassification"])
def test_heads_that_do_not_predict_the_next_token_are_refused(name: str) -> None:
    model = patched(llama(class_of(name)))
    with pytest.raises(fa2patch.errors.BadBatch, match=f"came to {name}"):
        model(**weighted()(features()))


# GPT-2 shifts labels in its own code; Mixtral has experts
@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_other_models_have_the_same_loss(family: str) -> None:
    model = of_family(family)
    expected = Result(torch.zeros(1), *one_by_one(model, features()))
    fa2patch.apply(model)
    found = Result(torch.zeros(1), *with_gradients(model, model(**weighted()(features())).loss))
    assert_right(found, expected)
