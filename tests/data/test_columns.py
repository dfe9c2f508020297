"""Columns of examples: loss masks, documents inside an example, labels, weights; and how alike examples are read."""

from __future__ import annotations

import types
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import fa2patch
from fa2patch.data import columns as module
from fa2patch.data.collators import DataCollatorWithFlattening
from fa2patch.documents.find import boundaries
from fa2patch.documents.names import COUNTED_LABEL as ONE
from fa2patch.errors import CollatorError

MASKS = ("completion_mask", "assistant_masks")


def collate(features: Any, **options: Any) -> dict[str, Any]:
    return DataCollatorWithFlattening(**options)(features)


class TestLossMasks:
    def test_a_column_that_says_what_is_learned_is_not_passed_over_in_silence(self) -> None:
        example = {"input_ids": [1, 2, 3], "completion_mask": [0, 1, 1]}
        with pytest.warns(UserWarning, match=r"completion_mask and no labels.*loss_masks=\['completion_mask'\]"):
            collate([example])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            collate([example], loss_masks=MASKS)
            collate([{**example, "labels": [-100, 2, 3]}])

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


class TestLabelsPerToken:
    def test_of_a_token_classifier_stay_at_the_first_token(self) -> None:
        features = [{"input_ids": [1, 2], "labels": [3, 4]}, {"input_ids": [5], "labels": [6]}]
        batch = collate(features, separator_id=None, pad_to_multiple_of=4)
        assert batch["labels"].tolist() == [[3, 4, 6, -100]]
        assert DataCollatorWithFlattening(separator_id=None)(features, separator_id=-7)["labels"].tolist() == [
            [-7, 4, -7]
        ]

    def test_what_seq2seq_padded_comes_back_unpadded(self) -> None:
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


EXAMPLES = [
    {"input_ids": [5, 6, 7, 8], "labels": [5, -100, 7, 8]},
    {"input_ids": [9, 10], "labels": [9, -100]},
    {"input_ids": [11], "labels": [11]},
    {"input_ids": [12, 13], "labels": [12, 13]},
]


def weighted(**options: Any) -> dict[str, Any]:
    return collate(EXAMPLES, loss_weights="document", **options)


class TestLossWeights:
    # tests/never_silent/test_loss_weights.py has the losses.

    def test_the_weights_of_a_document_add_up_to_one(self) -> None:
        batch = weighted()
        assert batch["labels"].tolist() == [[-100, -100, ONE, -100, -100, -100, -100, -100, ONE]]
        assert batch["loss_labels"].tolist() == [[-100, -100, 7, 8, -100, -100, -100, -100, 13]]
        assert batch["loss_weights"].tolist() == [[0, 0, 0.5, 0.5, 0, 0, 0, 0, 1]]
        assert [batch[name].dtype for name in ("labels", "loss_labels", "loss_weights")] == [
            torch.int64,
            torch.int64,
            torch.float32,
        ]

    def test_other_options_stay_as_they_are(self) -> None:
        plain = collate(EXAMPLES, return_seq_idx=True, pad_to_multiple_of=4)
        batch = weighted(return_seq_idx=True, pad_to_multiple_of=4)
        assert all(torch.equal(batch[name], plain[name]) for name in plain if name != "labels")
        assert torch.equal(batch["loss_labels"], plain["labels"])
        for separator in (None, 3):  # first labels are in no document's loss
            assert torch.equal(weighted(separator_id=separator)["loss_labels"], weighted()["loss_labels"])
        assert type(weighted(return_tensors="np")["loss_weights"]).__module__ == "numpy"

    def test_documents_inside_an_example(self) -> None:
        packed = {"input_ids": [5, 6, 7, 8, 9], "seq_lengths": [2, 3]}
        batch = collate([packed], loss_weights="document")
        assert batch["loss_weights"].tolist() == [[0, 1, 0, 0.5, 0.5]]

    @pytest.mark.parametrize("padding_free", [False, True])
    def test_completions(self, padding_free: bool) -> None:
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
        with pytest.raises(CollatorError, match="loss_weights is made by the collator"):
            collate([{"input_ids": [7, 3], "loss_weights": [1, 1]}])


class TestWeightsOfTokens:
    # tests/never_silent/test_loss_weights.py has the losses.

    WEIGHED = [{**one, "loss_weights": [0.5 * (at + number) for at in range(len(one["input_ids"]))]}
               for number, one in enumerate(EXAMPLES)]  # fmt: skip

    def test_every_token_in_the_loss_is_counted(self) -> None:
        batch = collate(self.WEIGHED, loss_weights="token", pad_to_multiple_of=10)
        assert batch["labels"].tolist() == [[-100, -100, ONE, ONE, -100, -100, -100, -100, ONE, -100]]
        assert batch["loss_labels"].tolist() == [[-100, -100, 7, 8, -100, -100, -100, -100, 13, -100]]
        assert batch["loss_weights"].tolist() == [[0, 0, 1, 1.5, 0, 0, 0, 0, 2, 0]]
        assert batch["loss_weights"].dtype == torch.float32

    def test_a_token_of_weight_zero_is_not_in_the_loss(self) -> None:
        batch = collate([{"input_ids": [5, 6, 7, 8], "loss_weights": [1, 0, 1, 0]}], loss_weights="token")
        assert batch["labels"].tolist() == [[-100, -100, ONE, -100]]
        assert batch["loss_labels"].tolist() == [[-100, -100, 7, -100]]

    @pytest.mark.parametrize(
        ("examples", "message"),
        [
            ([{"input_ids": [1]}], "loss_weights missing.*remove_unused_columns=False"),
            ([{"input_ids": [1, 2], "loss_weights": [1]}], "loss_weights has length 1"),
            ([{"input_ids": [1], "loss_weights": [1]}, {"input_ids": [1, 2], "loss_weights": [1, np.nan]}],
             "example 1: loss_weights holds nan"),
            ([{"input_ids": []}, {"input_ids": [1], "loss_weights": [np.inf]}], "example 1: loss_weights holds inf"),
            ([{"input_ids": [1], "loss_weights": [1], "loss_labels": [1]}], "loss_labels is made by the collator"),
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("completions", [False, True])
    def test_errors(self, examples: Any, message: str, completions: bool) -> None:
        tokenizer = types.SimpleNamespace(pad_token_id=0, padding_side="right")
        of_completions = fa2patch.DataCollatorForCompletionOnlyLM([1], tokenizer=tokenizer, loss_weights="token")
        collate = of_completions if completions else fa2patch.DataCollatorWithFlattening(loss_weights="token")
        with pytest.raises(CollatorError, match=message):
            collate(examples)


LENGTHS = (3, 1, 2, 5)
CONTAINERS = {
    "lists": list,
    "tuples": tuple,
    "arrays": np.array,
    "int32 arrays": lambda values: np.array(values, dtype=np.int32),
    "tensors": torch.tensor,
}


def examples(*containers: Any) -> list[dict[str, Any]]:
    made = []
    for number, length in enumerate(LENGTHS):
        columns = {
            "input_ids": list(range(10, 10 + length)),
            "labels": list(range(20, 20 + length)),
            "attention_mask": [1] * (length - 1) + [1 if length < 5 else 0],
            "seq_lengths": [1, length - 1] if length > 1 else [1],
            "completion_mask": [1] * length,
            "token_type_ids": [number] * length,
        }
        made.append({name: containers[number % len(containers)](values) for name, values in columns.items()})
    return made


ALL = {"loss_masks": MASKS[:1], "return_flash_attn_kwargs": True, "pad_to_multiple_of": 4}


def listed(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: getattr(values, "tolist", lambda values=values: values)() for name, values in batch.items()}


class TestAlikeExamples:
    # Alike examples are read as one long example. All others give the same batch, and their errors name the example.

    @pytest.fixture
    def called(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        calls: list[str] = []

        def counted(name: str) -> Any:
            function = getattr(module, name)

            def count(*arguments: Any) -> Any:
                calls.append(name)
                return function(*arguments)

            return count

        for name in ("as_numbers", "boundaries"):
            monkeypatch.setattr(module, name, counted(name))
        return calls

    @pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)
    def test_each_column_of_examples_that_are_alike_is_read_once(self, container: Any, called: list[str]) -> None:
        features = examples(container)
        collate(features, **ALL)
        assert sorted(called) == ["as_numbers"] * len(features[0]) + ["boundaries"]

    def test_documents_are_not_looked_for_where_each_example_is_one(self, called: list[str]) -> None:
        collate([{"input_ids": [1, 2]}, {"input_ids": [3]}], **ALL)
        assert called == ["as_numbers"]

    @pytest.mark.parametrize("first", CONTAINERS.values(), ids=CONTAINERS)
    @pytest.mark.parametrize("second", CONTAINERS.values(), ids=CONTAINERS)
    def test_examples_of_two_kinds_give_the_same_batch(self, first: Any, second: Any) -> None:
        assert listed(collate(examples(first, second), **ALL)) == listed(collate(examples(list), **ALL))

    @pytest.mark.parametrize(
        ("column", "dtype"),
        [
            ([[1, 2], [True, False]], torch.int64),
            ([[0.5, 1.0], [1, 2]], torch.float32),
            ([np.array([0.5, 2.0], dtype=np.float16), torch.tensor([1, 2])], torch.float32),
            ([np.array([1, 2], dtype=np.uint64), np.array([-1, 3])], torch.int64),
        ],
    )
    def test_a_further_column_of_several_dtypes(self, column: Any, dtype: torch.dtype) -> None:
        batch = collate([{"input_ids": [1, 2], "further": values} for values in column])
        assert batch["further"].dtype == dtype
        assert batch["further"].tolist() == [[float(value) for values in column for value in values]]

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({1: {"input_ids": [True, True]}}, "example 1: input_ids must be integers, found booleans"),
            ({1: {"input_ids": [1.0, 2.0]}}, "example 1: input_ids must be integers, found floats"),
            ({2: {"input_ids": [2**63]}}, "example 2: input_ids must fit into int64"),
            ({2: {"input_ids": [[1], [2]]}}, "example 2: input_ids must be one number per token, found shape"),
            ({1: {"input_ids": []}, 2: {"input_ids": ["x"]}}, "example 2: input_ids holds no plain numbers"),
            ({1: {"attention_mask": [0, 0]}, 2: {"attention_mask": [1, 2]}}, "example 2: attention_mask holds other"),
            ({1: {"attention_mask": [1, 2]}, 2: {"attention_mask": [0, 0]}}, "example 1: attention_mask holds other"),
            ({2: {"seq_lengths": [1]}}, "example 2: seq_lengths must be its documents' lengths"),
            ({0: {"seq_lengths": [2, 1]}, 1: {"seq_lengths": [1]}}, "example 0: seq_lengths must be its documents'"),
            ({1: {"labels": [1]}, 2: {"labels": [1, 2, 3]}}, "example 1: labels has length 1"),
        ],
    )
    def test_the_first_wrong_example_is_named(self, wrong: Any, message: str) -> None:
        right = {"input_ids": [1, 2], "labels": [1, 2], "attention_mask": [1, 1], "seq_lengths": [1, 1]}
        if any("input_ids" in columns for columns in wrong.values()):
            right = {"input_ids": [1, 2]}
        with pytest.raises(CollatorError, match=message):
            collate([{**right, **wrong.get(index, {})} for index in range(3)], **ALL)

    @pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)
    @pytest.mark.parametrize("count", [1, 4])
    def test_a_batch_shares_no_memory_with_examples_or_in_itself(self, container: Any, count: int) -> None:
        features = examples(container)[:count]
        given = [np.asarray(values) for example in features for values in example.values()]
        options = {**ALL, "pad_to_multiple_of": None, "return_seq_idx": True, "loss_weights": "document"}
        made = [
            values for values in collate(features, return_tensors="np", **options).values() if hasattr(values, "shape")
        ]
        for index, values in enumerate(made):
            assert not any(np.shares_memory(values, other) for other in [*given, *made[index + 1 :]])

    def test_tensors_are_on_torchs_default_device(self) -> None:
        padded = fa2patch.DataCollatorForCompletionOnlyLM([1])
        with torch.device("meta"):
            for batch in (collate(examples(list), **ALL), padded([[1, 2]])):
                devices = {values.device.type for values in batch.values() if isinstance(values, torch.Tensor)}
                assert devices == {"meta"}

    def test_a_column_has_one_dtype_padded_and_packed(self) -> None:
        features = [{"input_ids": [1, 2], "weights": [1, 0]}, {"input_ids": [1, 3], "weights": [0.5, 1.0]}]
        for padding_free in (False, True):
            batch = fa2patch.DataCollatorForCompletionOnlyLM([1], padding_free=padding_free)(features)
            assert batch["weights"].dtype == torch.float32
