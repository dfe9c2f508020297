"""Columns of newer datasets: loss masks, lengths of documents inside an example, and labels per token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from fa2patch.data.collators import DataCollatorWithFlattening
from fa2patch.documents.find import boundaries
from fa2patch.errors import CollatorError

MASKS = ("completion_mask", "assistant_masks")


def collate(features: Any, **options: Any) -> dict[str, Any]:
    return DataCollatorWithFlattening(**options)(features)


class TestLossMasks:
    def test_what_a_mask_hides_is_not_learned(self) -> None:
        features = [
            {"input_ids": [1, 2, 3], "completion_mask": [0, 1, 1], "assistant_masks": [1, 0, 1]},
            {"input_ids": [4, 5], "completion_mask": [True, True], "assistant_masks": np.array([1, 1])},
        ]
        batch = collate(features, loss_masks=MASKS)
        assert batch["labels"].tolist() == [[-100, -100, 3, -100, 5]]
        assert list(batch) == ["input_ids", "labels", "position_ids"]

    def test_given_labels_and_masked_tokens(self) -> None:
        example = {
            "input_ids": [1, 2, 3, 0],
            "labels": [10, 20, 30, 0],
            "completion_mask": [1, 1, 0, 1],
            "attention_mask": [1, 1, 1, 0],
        }
        assert collate([example], loss_masks=MASKS)["labels"].tolist() == [[-100, 20, -100]]

    def test_columns_that_are_not_there_count_for_nothing(self) -> None:
        assert collate([{"input_ids": [1, 2]}], loss_masks=MASKS)["labels"].tolist() == [[-100, 2]]

    def test_in_some_examples_only(self) -> None:
        with pytest.raises(CollatorError, match="completion_mask is in only some examples"):
            collate([{"input_ids": [1], "completion_mask": [1]}, {"input_ids": [1]}], loss_masks=MASKS)

    def test_padding(self) -> None:
        batch = collate([{"input_ids": [1, 2], "completion_mask": [0, 1]}], loss_masks=MASKS, pad_to_multiple_of=4)
        assert batch["labels"].tolist() == [[-100, 2, -100, -100]]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"loss_masks": "completion_mask"}, "loss_masks: expected names"),
            ({"loss_masks": MASKS, "document_labels": True}, "leave them out"),
        ],
    )
    def test_errors(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(CollatorError, match=message):
            DataCollatorWithFlattening(**options)


class TestSeqLengths:
    def test_documents_inside_an_example(self) -> None:
        features = [{"input_ids": [1, 2, 3, 4, 5], "seq_lengths": [2, 1, 2]}, {"input_ids": [6, 7], "seq_lengths": [2]}]
        batch = collate(features, return_flash_attn_kwargs=True, return_seq_idx=True, position_ids_start=1)
        assert batch["position_ids"].tolist() == [[1, 2, 1, 1, 2, 1, 2]]
        assert batch["cu_seq_lens_q"].tolist() == [0, 2, 3, 5, 7]
        assert batch["seq_idx"].tolist() == [[0, 0, 1, 2, 2, 3, 3]]
        assert batch["labels"].tolist() == [[-100, 2, -100, -100, 5, -100, 7]]
        assert "seq_lengths" not in batch

    def test_with_masked_tokens(self) -> None:
        example = {"input_ids": [0, 1, 2, 3, 0], "seq_lengths": [3, 2], "attention_mask": [0, 1, 1, 1, 0]}
        batch = collate([example], return_flash_attn_kwargs=True)
        assert batch["input_ids"].tolist() == [[1, 2, 3]]
        assert batch["cu_seq_lens_q"].tolist() == [0, 2, 3]

    def test_beside_position_ids_that_say_the_same(self) -> None:
        example = {"input_ids": [1, 2, 3], "seq_lengths": [1, 2], "position_ids": [4, 7, 8]}
        assert collate([example])["position_ids"].tolist() == [[4, 7, 8]]

    @pytest.mark.parametrize(
        ("lengths", "message"),
        [
            ([2, 2], r"positive integers that add up to its 3 tokens; found \[2, 2\]"),
            ([3, 0], "positive integers"),
            ([1.5, 1.5], "positive integers"),
            ([], "positive integers"),
        ],
    )
    def test_that_are_not_the_lengths(self, lengths: Any, message: str) -> None:
        with pytest.raises(CollatorError, match=f"example 1: seq_lengths must be its documents' lengths, .*{message}"):
            collate([{"input_ids": [1], "seq_lengths": [1]}, {"input_ids": [1, 2, 3], "seq_lengths": lengths}])

    def test_against_position_ids(self) -> None:
        with pytest.raises(CollatorError, match=r"seq_lengths says \[1, 2\], position_ids says \[3\]"):
            collate([{"input_ids": [1, 2, 3], "seq_lengths": [1, 2], "position_ids": [0, 1, 2]}])


class TestDocumentLabels:
    @pytest.mark.parametrize("name", ["labels", "label", "label_ids"])
    @pytest.mark.parametrize("kind", [int, np.int64, torch.tensor])
    def test_classes(self, name: str, kind: Any) -> None:
        features = [{"input_ids": [1, 2], name: kind(2)}, {"input_ids": [3], name: kind(0)}]
        batch = collate(features, document_labels=True, return_flash_attn_kwargs=True)
        assert batch["labels"].tolist() == [2, 0]
        assert batch["labels"].dtype == torch.int64
        assert batch["input_ids"].tolist() == [[1, 2, 3]]
        assert [key for key in batch if key.startswith("label")] == ["labels"]

    def test_numbers_and_several_numbers(self) -> None:
        one = collate([{"input_ids": [1], "labels": 0.5}, {"input_ids": [2], "labels": 1}], document_labels=True)
        assert one["labels"].tolist() == [0.5, 1.0]
        assert one["labels"].dtype == torch.float32
        several = collate(
            [{"input_ids": [1], "labels": [1, 0, 1]}, {"input_ids": [2, 3], "labels": [0, 0, 1]}], document_labels=True
        )
        assert several["labels"].tolist() == [[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]]
        assert several["labels"].dtype == torch.float32

    def test_several_documents_in_an_example(self) -> None:
        features = [
            {"input_ids": [1, 2, 3], "seq_lengths": [1, 2], "labels": [4, 5]},
            {"input_ids": [6], "seq_lengths": [1], "labels": 6},
        ]
        assert collate(features, document_labels=True)["labels"].tolist() == [4, 5, 6]

    def test_none_to_give(self) -> None:
        assert "labels" not in collate([{"input_ids": [1, 2]}, {"input_ids": [3]}], document_labels=True)

    def test_padding_is_told_and_has_no_label(self) -> None:
        features = [{"input_ids": [1, 2], "label": 1}, {"input_ids": [3], "label": 0}]
        batch = collate(features, document_labels=True, pad_to_multiple_of=4)
        assert batch["labels"].tolist() == [1, 0]
        assert batch["real_tokens"].tolist() == [[1, 1, 1, 0]]
        assert "attention_mask" not in batch
        assert boundaries(batch["position_ids"]).lengths == (2, 1, 1)

    @pytest.mark.parametrize(
        ("features", "message"),
        [
            ([{"input_ids": [1], "label": 1}, {"input_ids": [1]}], "labels is in only some examples: example 1"),
            ([{"input_ids": [1], "label": 1, "labels": 1}], "labels under more than one name: labels, label"),
            ([{"input_ids": [1, 2, 3], "seq_lengths": [1, 2], "labels": [1]}], r"shape \(1,\) for 2 documents"),
            ([{"input_ids": [1], "labels": [1, 2]}, {"input_ids": [1], "labels": [1]}], "example 1: labels of shape"),
            ([{"input_ids": [1], "label": "spam"}], "label holds no plain numbers"),
        ],
    )
    def test_errors(self, features: Any, message: str) -> None:
        with pytest.raises(CollatorError, match=message):
            collate(features, document_labels=True)

    def test_without_the_option_the_error_names_it(self) -> None:
        with pytest.raises(CollatorError, match="set document_labels=True"):
            collate([{"input_ids": [1, 2], "labels": 1}])


class TestLabelsPerToken:
    def test_of_a_token_classifier_stay_at_the_first_token(self) -> None:
        features = [{"input_ids": [1, 2], "labels": [3, 4]}, {"input_ids": [5], "labels": [6]}]
        batch = collate(features, separator_id=None, pad_to_multiple_of=4)
        assert batch["labels"].tolist() == [[3, 4, 6, -100]]
        assert DataCollatorWithFlattening(separator_id=None)(features, separator_id=-7)["labels"].tolist() == [
            [-7, 4, -7]
        ]

    def test_what_seq2seq_padded_comes_back_unpadded(self) -> None:
        """Each of DataCollatorForSeq2Seq's rows is given as an example; padding is dropped from the packed row."""
        tokenizers = pytest.importorskip("tokenizers")
        words = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "<unk>": 1}, "<unk>")),
            pad_token="<pad>",
        )
        features = [
            {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "labels": [-100, 6, 7]},
            {"input_ids": [8], "attention_mask": [1], "labels": [8]},
        ]
        for side in ("left", "right"):
            words.padding_side = side
            padded = transformers.DataCollatorForSeq2Seq(words)([dict(example) for example in features])
            rows = [{key: padded[key][at] for key in ("input_ids", "attention_mask", "labels")} for at in range(2)]
            assert rows[1]["input_ids"].tolist().count(0) == 2
            ours, expected = collate(rows), collate(features)
            assert {key: value.tolist() for key, value in ours.items()} == {
                key: value.tolist() for key, value in expected.items()
            }
