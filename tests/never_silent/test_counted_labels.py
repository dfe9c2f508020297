"""Which labels and documents count: padding is no document, an ignored label is ignored, no label is NaN."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest
import torch
import transformers
from small_models import (
    DOCS,
    alone,
    assert_close,
    called,
    class_of,
    llama,
    logits_alone,
    of_family,
    padded,
    patched,
    refusal,
    takes_any_name,
    told,
)
from torch.nn.functional import cross_entropy

import fa2patch
from compat_matrix.check.rows import documents
from fa2patch.preference import DataCollatorForPreferenceFlattening, per_document_logps

Batch = dict[str, Any]
TOKENS = torch.cat(DOCS)
STARTS = [0, *torch.tensor([len(doc) for doc in DOCS]).cumsum(0).tolist()[:-1]]


# Padding is no document


def pairs(number: int) -> list[Batch]:
    return [
        {"prompt_input_ids": [5 + n, 6, 7], "chosen_input_ids": [8, 9 + n], "rejected_input_ids": [10 + n, 11, 12]}
        for n in range(number)
    ]


def logps_alone(model: Any, number: int) -> torch.Tensor:
    found = []
    for side in ("chosen", "rejected"):
        for pair in pairs(number):
            prompt = pair["prompt_input_ids"]
            ids = torch.tensor(prompt + pair[f"{side}_input_ids"])
            logits = model(input_ids=ids[None]).logits[0, :-1]
            found.append(-cross_entropy(logits, ids[1:], reduction="none")[len(prompt) - 1 :].sum())
    return torch.stack(found).detach()


def said(batch: Batch) -> Any:
    # What ``per_document_logps`` takes: position ids or boundaries.
    if "cu_seq_lens_q" not in batch:
        return batch["position_ids"]
    return fa2patch.Boundaries(batch["cu_seq_lens_q"], batch["max_length_q"], parents=batch.get("segment_parents"))


@pytest.mark.parametrize("multiple", [None, 8, 64])
@pytest.mark.parametrize("options", [{}, {"return_flash_attn_kwargs": True}, {"share_prompts": True}], ids=str)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_there_are_two_sums_for_each_pair(number: int, options: Batch, multiple: int | None) -> None:
    model = llama()
    expected = logps_alone(model, number)
    fa2patch.apply(model)
    batch = DataCollatorForPreferenceFlattening(pad_to_multiple_of=multiple, **options)(pairs(number))
    labels = batch.pop("labels")
    with torch.no_grad():
        logits = model(**batch, use_cache=False).logits
    sums, counts = per_document_logps(logits, labels, said(batch), batch.get("real_tokens"))
    assert counts.tolist() == [2] * number + [3] * number
    assert_close(sums, expected, "sums")
    if multiple is not None and int(batch["real_tokens"].min()) == 0:
        with refusal(r"may be the padding.*Pass real_tokens", fa2patch.errors.BadBatch):
            per_document_logps(logits, labels, said(batch))


def test_a_completion_of_which_nothing_was_kept_has_a_sum_of_nothing() -> None:
    pair = {"prompt_input_ids": [5, 6, 7], "chosen_input_ids": [8], "rejected_input_ids": [9]}
    batch = DataCollatorForPreferenceFlattening(max_length=3, pad_to_multiple_of=4)([pair, *pairs(1)])
    logits = torch.zeros(*batch["input_ids"].shape, 32)
    sums, counts = per_document_logps(logits, batch["labels"], batch["position_ids"], batch["real_tokens"])
    assert counts.tolist() == [0, 0, 0, 0]
    batch = DataCollatorForPreferenceFlattening(max_length=3)([pair])
    with pytest.raises(fa2patch.errors.BadBatch, match=r"torch.ones_like\(labels\) if the row has no padding"):
        per_document_logps(logits[:, :6], batch["labels"], batch["position_ids"])
    sums, counts = per_document_logps(
        logits[:, :6], batch["labels"], batch["position_ids"], torch.ones_like(batch["labels"])
    )
    assert sums.tolist() == [0, 0]


def test_real_tokens_of_another_shape_are_an_error() -> None:
    labels = torch.ones(1, 4).long()
    with pytest.raises(fa2patch.errors.BadBatch, match=r"expected real_tokens \[1, 4\], found \[1, 3\]"):
        per_document_logps(torch.zeros(1, 4, 8), labels, torch.arange(4)[None], torch.ones(1, 3))


def test_a_classifiers_padding_has_no_label_and_no_row() -> None:
    model = llama(class_of("LlamaForSequenceClassification"), num_labels=3)
    docs = documents(5, 3, 4)
    expected = logits_alone(model, docs)
    fa2patch.apply(model)
    examples = [{"input_ids": doc.tolist(), "label": number} for number, doc in enumerate(docs)]
    for options in ({}, {"return_flash_attn_kwargs": True}):
        collate = fa2patch.DataCollatorWithFlattening(document_labels=True, pad_to_multiple_of=8, **options)
        found = model(**collate(examples))
        assert_close(found.logits.detach(), expected, "logits")
        assert_close(found.loss.detach(), cross_entropy(expected, torch.arange(3)), "loss")


def test_a_classifier_of_shared_prompts_has_no_row_for_padding() -> None:
    model = llama(class_of("LlamaForSequenceClassification"), num_labels=3)
    pair = pairs(1)[0]
    docs = [torch.tensor(pair["prompt_input_ids"] + pair[f"{side}_input_ids"]) for side in ("chosen", "rejected")]
    expected = logits_alone(model, docs)
    fa2patch.apply(model, prove=False)
    batch = DataCollatorForPreferenceFlattening(share_prompts=True, pad_to_multiple_of=16)([pair])
    batch.pop("labels")
    assert_close(model(**batch).logits.detach(), expected, "logits")


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "LlamaForSequenceClassification"])
def test_padding_of_zero_embeddings_is_not_taken_for_a_model_that_ignores_them(name: str) -> None:
    # The proof gives every second document other embeddings, and here this is the padding alone.
    model = llama(class_of(name))
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = 0
    ids = DOCS[0]
    expected = model(input_ids=ids[None]).logits.detach()
    fa2patch.apply(model, prove=True)
    options = {"document_labels": True} if "Sequence" in name else {}
    collate = fa2patch.DataCollatorWithFlattening(pad_to_multiple_of=16, **options)
    found = model(**collate([{"input_ids": ids.tolist()}])).logits.detach()
    assert_close(found.flatten()[: expected.numel()], expected.flatten(), "logits")


# Another label is ignored


def require_ignore_index(model: Any) -> None:
    if not takes_any_name(model):
        pytest.skip(f"{type(model).__name__} of Transformers {transformers.__version__} takes no ignore_index")


def ignoring(model: Any, ignored: int) -> tuple[torch.Tensor, torch.Tensor]:
    # Every third label is ignored. The loss is that of the documents alone over the others.
    labels = TOKENS.clone()
    labels[labels == ignored] = 3 if ignored >= 0 else ignored
    labels[::3] = ignored
    inside = labels.clone()
    inside[STARTS] = ignored
    return labels[None], cross_entropy(alone(model).logits[:-1], inside[1:], ignore_index=ignored)


@pytest.mark.parametrize("ignored", [-7, 0, 9])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_label_that_the_call_ignores(family: str, ignored: int) -> None:
    model = of_family(family)
    require_ignore_index(model)
    labels, expected = ignoring(model, ignored)
    fa2patch.apply(model)
    found = called(model, told(labels=labels, ignore_index=ignored)).loss
    assert_close(found, expected, f"loss {found} ({expected})")


def test_a_loss_function_that_ignores_another_label() -> None:
    model = llama()
    if getattr(getattr(type(model), "loss_function", None), "fset", None) is None:
        pytest.skip(f"LlamaForCausalLM of Transformers {transformers.__version__} takes no loss function")
    labels, expected = ignoring(model, 0)
    model.loss_function = functools.partial(model.loss_function, ignore_index=0)
    found = called(patched(model), told(labels=labels)).loss
    assert_close(found, expected, f"loss {found} ({expected})")


def test_document_weights_and_another_ignored_label_are_refused() -> None:
    model = patched()
    batch = fa2patch.DataCollatorWithFlattening(loss_weights="document")([{"input_ids": doc.tolist()} for doc in DOCS])
    with refusal("came with ignore_index=5", fa2patch.errors.BadBatch):
        model(**batch, ignore_index=5)
    require_ignore_index(model)
    assert torch.equal(model(**batch, ignore_index=-100).loss, model(**batch).loss)


def test_sums_of_labels_that_a_collator_ignores() -> None:
    # TRL's interface: labels outside completions are ``ignore_index``.
    examples = [[4, 7, 5, 6], [7, 8, 9]]
    batches = [
        fa2patch.DataCollatorForCompletionOnlyLM([7], padding_free=True, ignore_index=ignored)(examples)
        for ignored in (-100, 0)
    ]
    logits = torch.randn(1, 7, 16)
    sums = [
        per_document_logps(logits, batch["labels"], batch["position_ids"], ignore_index=ignored)
        for batch, ignored in zip(batches, (-100, 0))
    ]
    assert torch.equal(sums[0][0], sums[1][0])
    assert sums[1][1].tolist() == [2, 2]


# No label is left


WITHOUT_LABELS = [{"input_ids": doc.tolist(), "labels": [-100] * len(doc)} for doc in DOCS]
OF_ONE_TOKEN = [{"input_ids": [5]}, {"input_ids": [6]}]


@pytest.mark.parametrize("weights", [None, "document"])
def test_without_labels_the_loss_is_that_of_the_padded_batch(weights: str | None) -> None:
    model, batch = llama(), padded()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    assert model(**batch, use_cache=False).loss.isnan()
    fa2patch.apply(model)
    for examples, multiple in ((WITHOUT_LABELS, None), (WITHOUT_LABELS, 32), (OF_ONE_TOKEN, None)):
        collate = fa2patch.DataCollatorWithFlattening(loss_weights=weights, pad_to_multiple_of=multiple)
        assert model(**collate(examples)).loss.isnan()


@pytest.mark.parametrize("weights", [None, "document"])
def test_without_labels_in_one_batch_of_a_step(weights: str | None) -> None:
    # Trainer from 4.46 on hands over how many labels the step has. A batch without any adds nothing to it.
    model = patched()
    if weights is None:
        require_ignore_index(model)
    batch = fa2patch.DataCollatorWithFlattening(loss_weights=weights)(WITHOUT_LABELS)
    assert float(model(**batch, num_items_in_batch=torch.tensor(3)).loss.detach()) == 0


def test_a_padded_batch_with_document_weights_and_no_labels() -> None:
    model = patched()
    tokenizer = types.SimpleNamespace(pad_token_id=0, padding_side="right", decode=lambda ids, **how: str(ids))
    collate = fa2patch.DataCollatorForCompletionOnlyLM([2], tokenizer=tokenizer, loss_weights="document")
    with pytest.warns(UserWarning, match="not found"):
        batch = dict(collate([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}]))
    assert model(**batch).loss.isnan()
