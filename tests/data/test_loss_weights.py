"""The labels and weights of ``loss_weights="document"``; tests/never_silent/test_document_loss.py has the losses."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

import fa2patch
from fa2patch.documents.names import COUNTED_LABEL as ONE
from fa2patch.errors import CollatorError

EXAMPLES = [
    {"input_ids": [5, 6, 7, 8], "labels": [5, -100, 7, 8]},
    {"input_ids": [9, 10], "labels": [9, -100]},
    {"input_ids": [11], "labels": [11]},
    {"input_ids": [12, 13], "labels": [12, 13]},
]


def flattening(**options: Any) -> dict[str, Any]:
    return fa2patch.DataCollatorWithFlattening(loss_weights="document", **options)(EXAMPLES)


def test_the_weights_of_a_document_add_up_to_one() -> None:
    batch = flattening()
    assert batch["labels"].tolist() == [[-100, -100, ONE, -100, -100, -100, -100, -100, ONE]]
    assert batch["loss_labels"].tolist() == [[-100, -100, 7, 8, -100, -100, -100, -100, 13]]
    assert batch["loss_weights"].tolist() == [[0, 0, 0.5, 0.5, 0, 0, 0, 0, 1]]
    assert [batch[name].dtype for name in ("labels", "loss_labels", "loss_weights")] == [
        torch.int64,
        torch.int64,
        torch.float32,
    ]


def test_other_options_stay_as_they_are() -> None:
    plain = fa2patch.DataCollatorWithFlattening(return_seq_idx=True, pad_to_multiple_of=4)(EXAMPLES)
    batch = flattening(return_seq_idx=True, pad_to_multiple_of=4)
    assert all(torch.equal(batch[name], plain[name]) for name in plain if name != "labels")
    assert torch.equal(batch["loss_labels"], plain["labels"])
    for separator in (None, 3):  # first labels are in no document's loss
        assert torch.equal(flattening(separator_id=separator)["loss_labels"], flattening()["loss_labels"])
    assert type(flattening(return_tensors="np")["loss_weights"]).__module__ == "numpy"


def test_documents_inside_an_example() -> None:
    packed = {"input_ids": [5, 6, 7, 8, 9], "seq_lengths": [2, 3]}
    batch = fa2patch.DataCollatorWithFlattening(loss_weights="document")([packed])
    assert batch["loss_weights"].tolist() == [[0, 1, 0, 0.5, 0.5]]


@pytest.mark.parametrize("padding_free", [False, True])
def test_completions(padding_free: bool) -> None:
    tokenizer = types.SimpleNamespace(pad_token_id=0, padding_side="right")
    options = {"padding_free": padding_free, "ignore_index": -7, "loss_weights": "document"}
    collate = fa2patch.DataCollatorForCompletionOnlyLM([7], tokenizer=tokenizer, **options)
    batch = collate([[5, 7, 1, 2], [7, 3]])
    rows = [[0, 0, 0.5, 0.5], [0, 1, 0, 0]]
    expected = [[*rows[0], *rows[1][:2]]] if padding_free else rows
    assert batch["loss_weights"].tolist() == expected
    assert ((batch["loss_labels"] != -100) == (batch["loss_weights"] > 0)).all()
    assert (batch["labels"] == ONE).sum() == 2
    assert (batch["labels"] == -100).sum() == batch["labels"].numel() - 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_weights": "token"}, "loss_weights: expected 'document' or None, found 'token'"),
        ({"loss_weights": "document", "document_labels": True}, "leave them out with document_labels=True"),
    ],
)
def test_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CollatorError, match=message):
        fa2patch.DataCollatorWithFlattening(**options)


def test_columns_of_the_same_name_are_refused() -> None:
    collate = fa2patch.DataCollatorWithFlattening(loss_weights="document")
    with pytest.raises(CollatorError, match="loss_weights is made by the collator"):
        collate([{"input_ids": [5, 6], "loss_weights": [1.0, 2.0]}])
