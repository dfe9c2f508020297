"""The collator of pairs: sources in one row, targets in another, as the model takes them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pairs import alone, built, counted, pairs

import fa2patch
from fa2patch.errors import CollatorError


def examples(family="bart"):
    batch = pairs(family)
    name = batch.name
    return [
        {name: source[0].tolist(), "labels": target[0].tolist()} for source, target in zip(batch.sources, batch.targets)
    ]


def test_both_rows_with_their_lengths():
    batch = fa2patch.DataCollatorForSeq2Seq()(examples())
    known = pairs("bart")
    assert torch.equal(batch["input_ids"], torch.cat(known.sources, 1))
    assert torch.equal(batch["labels"], torch.cat(known.targets, 1))
    assert torch.equal(batch["position_ids"], counted(known.sources))
    assert torch.equal(batch["decoder_position_ids"], counted(known.targets))
    assert batch["cu_seq_lens_q"].tolist() == [0, 6, 8, 17, 21, 22] and batch["max_length_k"] == 9
    assert batch["decoder_cu_seq_lens_k"].tolist() == [0, 5, 8, 15, 17, 21] and batch["decoder_max_length_q"] == 7


def test_what_a_tokenizer_padded_is_left_out():
    padded = [
        {
            "input_ids": [*example["input_ids"], 1, 1],
            "attention_mask": [*[1] * len(example["input_ids"]), 0, 0],
            "labels": [*example["labels"], -100, -100, -100],
        }
        for example in examples()
    ]
    made, expected = (fa2patch.DataCollatorForSeq2Seq()(each) for each in (padded, examples()))
    assert made.keys() == expected.keys()
    assert all(torch.equal(torch.as_tensor(made[name]), torch.as_tensor(expected[name])) for name in made)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"return_flash_attn_kwargs": False},
        {"pad_to_multiple_of": 16, "pad_token_id": 1},
        {"pad_to_multiple_of": 32, "max_documents": 8, "longest_source": 32, "longest_target": 32, "pad_token_id": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["t5", "bart", "whisper"])
def test_a_patched_model_computes_each_pair_as_alone(family, options):
    model = built(family)
    loss, logits, gradients = alone(model, pairs(family))
    fa2patch.apply(model, prove=False)
    if family == "whisper" and "pad_to_multiple_of" in options:
        return  # the padding of the targets would need a sound of its own
    batch = fa2patch.DataCollatorForSeq2Seq(**options)(examples(family))
    output = model(**batch)
    assert output.loss.item() == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(output.logits[0, : len(logits)], logits, rtol=1e-4, atol=1e-4)
    if "max_documents" in options:
        others = fa2patch.DataCollatorForSeq2Seq(**options)(examples(family)[:3])
        assert {name: np.shape(value) for name, value in others.items()} == {
            name: np.shape(value) for name, value in batch.items()
        }


@pytest.mark.parametrize("family", ["t5", "bart", "mbart"])
def test_the_model_makes_decoder_inputs_in_the_collator(family):
    model = built(family)
    made = fa2patch.DataCollatorForSeq2Seq(model=model)(examples(family))
    fa2patch.apply(model, prove=False)
    expected = model(**fa2patch.DataCollatorForSeq2Seq()(examples(family))).logits
    labels = made.pop("labels")
    assert made["decoder_input_ids"].shape == labels.shape
    assert torch.equal(model(**made).logits, expected)
    with pytest.raises(CollatorError, match="found Linear"):
        fa2patch.DataCollatorForSeq2Seq(model=torch.nn.Linear(1, 1))(examples(family))


def test_decoder_inputs_are_packed_beside_labels():
    with_inputs = [{**example, "decoder_input_ids": [2, *example["labels"][:-1]]} for example in examples()]
    batch = fa2patch.DataCollatorForSeq2Seq()(with_inputs)
    model = built("bart")
    fa2patch.apply(model, prove=False)
    expected = model(**fa2patch.DataCollatorForSeq2Seq()(examples())).logits
    assert torch.equal(model(**batch).logits, expected)


def test_arrays():
    batch = fa2patch.DataCollatorForSeq2Seq(return_tensors="np")(examples())
    assert isinstance(batch["labels"], np.ndarray) and isinstance(batch["decoder_cu_seq_lens_q"], np.ndarray)


@pytest.mark.parametrize(
    ("example", "says"),
    [
        ({"input_ids": [5, 6]}, "example 1: .* found no labels"),
        ({"input_ids": [5, 6], "labels": []}, "example 1: expected labels .* found none"),
        ({"input_ids": [5, 6], "labels": [-100, -100]}, "example 1: expected labels .* found none"),
        ({"input_ids": [], "labels": [5]}, "a source without tokens"),
        ({"labels": [5]}, "example 1: expected input_ids"),
        ({"input_ids": [5, 6], "labels": [5], "weights": [1]}, "example 1: .* found 'weights' among its columns"),
    ],
)
def test_examples_that_are_no_pairs(example, says):
    with pytest.raises(CollatorError, match=says):
        fa2patch.DataCollatorForSeq2Seq()([examples()[0], example])


def test_options_that_do_not_fit():
    with pytest.raises(CollatorError, match="Set return_flash_attn_kwargs=True"):
        fa2patch.DataCollatorForSeq2Seq(return_flash_attn_kwargs=False, pad_to_multiple_of=8)
    with pytest.raises(CollatorError, match="max_documents=3, but a row has 5"):
        fa2patch.DataCollatorForSeq2Seq(max_documents=3)(examples())
