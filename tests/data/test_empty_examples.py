"""Examples without tokens are left out and counted by every collator, as Transformers' own does from 5.24 on."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import fa2patch
from fa2patch.errors import CollatorError
from fa2patch.preference import DataCollatorForPreferenceFlattening

FULL = [{"input_ids": [5, 6, 7], "labels": [5, -100, 7]}, {"input_ids": [8, 9], "labels": [8, 9]}]
EMPTY: dict[str, dict[str, Any]] = {
    "lists": {"input_ids": [], "labels": []},
    "no labels": {"input_ids": []},
    "tensors": {"input_ids": torch.tensor([], dtype=torch.int64), "labels": torch.tensor([], dtype=torch.int64)},
    "floats, as NumPy makes them": {"input_ids": np.array([]), "labels": np.array([])},
    "hidden": {"input_ids": [0, 0], "labels": [0, 0], "attention_mask": [0, 0]},
    "seq_lengths": {"input_ids": [], "labels": [], "seq_lengths": []},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"return_flash_attn_kwargs": True, "return_seq_idx": True, "pad_to_multiple_of": 4},
    "by document": {"loss_weights": "document"},
}


def assert_equal(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value) if isinstance(value, torch.Tensor) else found[key] == value, key


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("options", OPTIONS)
def test_an_empty_example_is_left_out_and_counted(options: str, empty: str, place: int) -> None:
    collate = fa2patch.DataCollatorWithFlattening(**OPTIONS[options])
    examples = [*FULL[:place], EMPTY[empty], *FULL[place:]]
    if empty == "hidden":
        examples = [{"attention_mask": [1] * len(one["input_ids"]), **one} for one in examples]
    expected = collate(FULL)
    assert collate.empty == 0
    assert_equal(collate(examples), expected)
    assert collate.empty == 1
    collate([*examples, EMPTY[empty]])
    assert collate.empty == 3
    assert collate == fa2patch.DataCollatorWithFlattening(**OPTIONS[options]), "a count is no option"


def test_the_batch_is_upstreams() -> None:
    transformers = pytest.importorskip("transformers", minversion="5.24")
    examples = [EMPTY["lists"], *FULL, EMPTY["lists"]]
    assert_equal(fa2patch.DataCollatorWithFlattening()(examples), transformers.DataCollatorWithFlattening()(examples))


@pytest.mark.parametrize("number", [1, 2])
def test_a_batch_of_empty_examples_is_an_error(number: int) -> None:
    tokenizer = types.SimpleNamespace(pad_token_id=0, decode=lambda ids, **_: "")
    collators = [
        fa2patch.DataCollatorWithFlattening(),
        fa2patch.DataCollatorForCompletionOnlyLM([5], tokenizer=tokenizer),
    ]
    message = f"all {number} examples.*without tokens" if number > 1 else "the only example.*without tokens"
    for collate in collators:
        with pytest.raises(CollatorError, match=message + ".*dataset.filter"):
            collate([EMPTY["lists"]] * number)


def test_errors_count_the_examples_as_they_were_given() -> None:
    collate = fa2patch.DataCollatorWithFlattening(loss_masks=("mask",))
    examples = [{"input_ids": [], "mask": []}, {"input_ids": [1], "mask": [1]}, {"input_ids": [2, 3], "mask": [1, 0.5]}]
    with pytest.raises(CollatorError, match="example 2: the loss mask"):
        collate(examples)
    positions = [{"input_ids": [], "position_ids": []}, *({"input_ids": [1], "position_ids": [at]} for at in (0, 1))]
    with pytest.raises(CollatorError, match="where example 2"):
        fa2patch.DataCollatorWithFlattening()(positions)
    wrong = [{"input_ids": [], "labels": 1}, {"input_ids": [1, 2], "labels": 1}, {"input_ids": [1], "labels": [1, 2]}]
    with pytest.raises(CollatorError, match="example 2: labels of shape"):
        fa2patch.DataCollatorWithFlattening(document_labels=True)(wrong)


def test_an_empty_example_takes_its_document_label_with_it() -> None:
    collate = fa2patch.DataCollatorWithFlattening(document_labels=True)
    batch = collate([{"input_ids": [1, 2], "label": 4}, {"input_ids": [], "label": 5}, {"input_ids": [3], "label": 6}])
    assert batch["labels"].tolist() == [4, 6]
    assert collate.empty == 1


@pytest.mark.parametrize("padding_free", [True, False])
def test_completions(padding_free: bool) -> None:
    tokenizer = types.SimpleNamespace(pad_token_id=0)
    collate = fa2patch.DataCollatorForCompletionOnlyLM([6], tokenizer=tokenizer, padding_free=padding_free)
    full = [{"input_ids": [5, 6, 7]}, {"input_ids": [6, 9]}]
    expected = collate(full)
    assert_equal(dict(collate([{"input_ids": []}, full[0], [], full[1]])), dict(expected))
    assert collate.empty == 2
    tokenizer.decode = lambda ids, **_: "text"
    with pytest.warns(UserWarning, match="example 2 of the batch"):
        collate([[], full[0], [1, 2]])


@pytest.mark.parametrize("share_prompts", [False, True])
def test_pairs(share_prompts: bool) -> None:
    collate = DataCollatorForPreferenceFlattening(share_prompts=share_prompts)
    full = [
        {"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [4, 5], "ref_chosen_logps": -1.0,
         "ref_rejected_logps": -2.0},
        {"prompt_ids": [6], "chosen_ids": [7], "rejected_ids": [], "ref_chosen_logps": -3.0, "ref_rejected_logps": 0.0},
    ]  # fmt: skip
    empty = {"prompt_ids": [], "chosen_ids": [], "rejected_ids": [], "ref_chosen_logps": 0.0, "ref_rejected_logps": 0.0}
    assert_equal(collate([full[0], empty, full[1]]), collate(full))
    assert collate.empty == 1
    with pytest.raises(CollatorError, match="the only example.*without tokens"):
        collate([empty])
    with pytest.raises(CollatorError, match="example 1: no token in prompt and chosen"):
        collate([empty, {**empty, "rejected_ids": [1]}])


def test_workers_count_their_own() -> None:
    collate = fa2patch.DataCollatorWithFlattening()
    loader = DataLoader([FULL[0], EMPTY["lists"]], batch_size=2, collate_fn=collate, num_workers=1)
    assert next(iter(loader))["input_ids"].tolist() == [[5, 6, 7]]
    assert collate.empty == 0
