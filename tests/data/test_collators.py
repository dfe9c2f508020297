"""The collator compared with Transformers' own, and its additional features."""

from __future__ import annotations

import inspect
import pickle
import warnings
from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch

from fa2patch.data.collators import DataCollatorWithFlattening
from fa2patch.documents.find import boundaries
from fa2patch.errors import CollatorError, Fa2PatchError

PLAIN = [{"input_ids": [5, 6, 7]}, {"input_ids": [8]}, {"input_ids": [9, 10]}]
LABELLED = [
    {"input_ids": [5, 6, 7], "labels": [-100, 60, 70]},
    {"input_ids": [8], "labels": [80]},
    {"input_ids": [9, 10], "labels": [90, -100]},
]
MASKED = [{**example, "attention_mask": [1] * len(example["input_ids"])} for example in LABELLED]
CONTAINERS = {
    "list": list,
    "array": np.array,
    "int32 array": lambda v: np.array(v, dtype=np.int32),
    "tensor": torch.tensor,
}


def collate(features: Any, **options: Any) -> dict[str, Any]:
    return DataCollatorWithFlattening(**options)(features)


def values(batch: dict[str, Any]) -> dict[str, Any]:
    return {key: value if isinstance(value, int) else value.tolist() for key, value in batch.items()}


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert list(ours) == list(theirs)
    for key, expected in theirs.items():
        assert type(ours[key]) is type(expected), key
        if not isinstance(expected, int):
            assert ours[key].dtype == expected.dtype, key
            assert ours[key].shape == expected.shape, key
    assert values(ours) == values(theirs)


def upstream() -> Any:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "DataCollatorWithFlattening"):
        pytest.skip(f"Transformers {transformers.__version__} has no DataCollatorWithFlattening")
    return transformers.DataCollatorWithFlattening


def upstream_with(**options: Any) -> Any:
    known = inspect.signature(upstream().__init__).parameters
    missing = sorted(set(options) - set(known) - {"return_tensors"})
    if missing:
        pytest.skip(f"this Transformers' collator has no {', '.join(missing)}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return upstream()(**options)


class TestUpstream:
    @pytest.mark.parametrize("return_tensors", ["pt", "np"])
    @pytest.mark.parametrize("features", [PLAIN, LABELLED, MASKED], ids=["plain", "labelled", "masked"])
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"return_position_ids": False},
            {"separator_id": -7},
            {"return_flash_attn_kwargs": True},
            {"return_seq_idx": True},
            {"return_flash_attn_kwargs": True, "return_seq_idx": True, "return_position_ids": False},
            {"position_ids_start": 2},
        ],
        ids=lambda options: "+".join(options) or "defaults",
    )
    def test_same_batch(self, options: dict[str, Any], features: Any, return_tensors: str) -> None:
        theirs = upstream_with(**options)(features, return_tensors=return_tensors)
        assert_same(DataCollatorWithFlattening(**options)(features, return_tensors=return_tensors), theirs)
        assert_same(collate(features, return_tensors=return_tensors, **options), theirs)

    def test_same_batch_with_separator_per_call(self) -> None:
        upstream_with(separator_id=-100)
        theirs = upstream_with()(LABELLED, separator_id=-3)
        assert_same(DataCollatorWithFlattening(separator_id=-9)(LABELLED, separator_id=-3), theirs)
        assert_same(DataCollatorWithFlattening()(LABELLED, "pt", -3), theirs)

    def test_every_option_with_the_same_default(self) -> None:
        theirs = inspect.signature(upstream().__init__).parameters
        ours = inspect.signature(DataCollatorWithFlattening).parameters
        named = {name: p for name, p in theirs.items() if p.kind is p.KEYWORD_ONLY}
        assert [name for name in ours if name in named] == list(named)
        assert {name: ours[name].default for name in named} == {name: p.default for name, p in named.items()}

    def test_first_positional_option_is_return_tensors(self) -> None:
        upstream()
        assert_same(DataCollatorWithFlattening("np")(PLAIN), upstream_with(return_tensors="np")(PLAIN))


class TestContract:
    # These tests need no collator of Transformers to compare with.

    def test_everything_on(self) -> None:
        batch = collate(LABELLED, return_flash_attn_kwargs=True, return_seq_idx=True)
        assert values(batch) == {
            "input_ids": [[5, 6, 7, 8, 9, 10]],
            "labels": [[-100, 60, 70, -100, -100, -100]],
            "position_ids": [[0, 1, 2, 0, 0, 1]],
            "seq_idx": [[0, 0, 0, 1, 2, 2]],
            "cu_seq_lens_q": [0, 3, 4, 6],
            "cu_seq_lens_k": [0, 3, 4, 6],
            "max_length_q": 3,
            "max_length_k": 3,
        }
        assert {key: value.dtype for key, value in batch.items() if isinstance(value, torch.Tensor)} == {
            "input_ids": torch.int64,
            "labels": torch.int64,
            "position_ids": torch.int64,
            "seq_idx": torch.int32,
            "cu_seq_lens_q": torch.int32,
            "cu_seq_lens_k": torch.int32,
        }
        assert type(batch["max_length_q"]) is type(batch["max_length_k"]) is int

    def test_q_and_k_share_no_memory(self) -> None:
        batch = collate(PLAIN, return_flash_attn_kwargs=True)
        batch["cu_seq_lens_q"][0] = 5
        assert batch["cu_seq_lens_k"][0] == 0

    def test_defaults(self) -> None:
        assert values(collate(PLAIN)) == {
            "input_ids": [[5, 6, 7, 8, 9, 10]],
            "labels": [[-100, 6, 7, -100, -100, 10]],
            "position_ids": [[0, 1, 2, 0, 0, 1]],
        }

    def test_position_ids_start(self) -> None:
        assert collate(PLAIN, position_ids_start=2)["position_ids"].tolist() == [[2, 3, 4, 2, 2, 3]]

    def test_separator_of_the_call_wins_even_if_zero(self) -> None:
        collator = DataCollatorWithFlattening(separator_id=-7)
        assert collator(PLAIN)["labels"].tolist() == [[-7, 6, 7, -7, -7, 10]]
        assert collator(PLAIN, separator_id=0)["labels"].tolist() == [[0, 6, 7, 0, 0, 10]]
        assert collator(PLAIN)["labels"].tolist() == [[-7, 6, 7, -7, -7, 10]]

    def test_a_first_label_of_its_own_that_is_dropped_is_said_once(self) -> None:
        collator = DataCollatorWithFlattening()
        with pytest.warns(UserWarning, match="Here one is 80 for the token 8.*separator_id=None"):
            collator(LABELLED)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            collator(LABELLED)
            for others in (PLAIN, [{**one, "labels": one["input_ids"]} for one in PLAIN]):
                DataCollatorWithFlattening(pad_to_multiple_of=8)(others)
            assert collator.with_first_labels()(LABELLED)["labels"].tolist() == [[-100, 60, 70, 80, 90, -100]]

    @pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)
    @pytest.mark.parametrize("return_tensors", ["pt", "np"])
    def test_containers(self, container: Any, return_tensors: str) -> None:
        options = {"return_flash_attn_kwargs": True, "return_seq_idx": True, "return_tensors": return_tensors}
        features = [{key: container(value) for key, value in example.items()} for example in MASKED]
        assert_same(collate(features, **options), collate(MASKED, **options))

    def test_examples_stay_as_they_were(self) -> None:
        features = [{key: np.array(value) for key, value in example.items()} for example in MASKED]
        for example in features:
            for value in example.values():
                value.flags.writeable = False
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "labels: the first one")
            batch = collate(features, return_tensors="np", pad_to_multiple_of=4)
        batch["input_ids"][:] = 0
        assert [example["input_ids"].tolist() for example in features] == [[5, 6, 7], [8], [9, 10]]

    def test_mapping_that_is_no_dict(self) -> None:
        assert_same(collate([UserDict(example) for example in LABELLED]), collate(LABELLED))

    def test_none_counts_as_absent(self) -> None:
        features = [{**example, "labels": None, "weights": None} for example in PLAIN]
        assert_same(collate(features), collate(PLAIN))

    def test_construction_is_silent_and_repr_readable(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            collator = DataCollatorWithFlattening(return_seq_idx=True, pad_to_multiple_of=8)
        assert "return_seq_idx=True" in repr(collator)
        assert "pad_to_multiple_of=8" in repr(collator)
        assert pickle.loads(pickle.dumps(collator)) == collator

    @pytest.mark.slow
    def test_workers(self) -> None:
        collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
        loader = torch.utils.data.DataLoader(
            LABELLED * 2, batch_size=3, num_workers=2, collate_fn=collator, multiprocessing_context="spawn"
        )
        batches = list(loader)
        assert len(batches) == 2
        for batch in batches:
            assert_same(batch, collator(LABELLED))


class TestFurtherKeys:
    def test_concatenated_with_their_kind_of_dtype(self) -> None:
        features = [
            {"input_ids": [1, 2], "completion_mask": [0, 1], "ok": [True, False], "weights": [0.5, 1.0]},
            {"input_ids": [3], "completion_mask": [1], "ok": [True], "weights": [2]},
        ]
        features = [{**each, "labels": each["input_ids"]} for each in features]
        batch = collate(features)
        assert list(batch) == ["input_ids", "labels", "position_ids", "completion_mask", "ok", "weights"]
        assert batch["completion_mask"].tolist() == [[0, 1, 1]]
        assert batch["ok"].tolist() == [[1, 0, 1]]
        assert batch["weights"].tolist() == [[0.5, 1.0, 2.0]]
        assert batch["completion_mask"].dtype == batch["ok"].dtype == torch.int64
        assert batch["weights"].dtype == torch.float32

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
    def test_any_float_becomes_float32(self, dtype: torch.dtype) -> None:
        weights = torch.tensor([0.5, 2.0], dtype=dtype, requires_grad=True)
        batch = collate([{"input_ids": [1, 2], "weights": weights}])
        assert batch["weights"].dtype == torch.float32
        assert batch["weights"].tolist() == [[0.5, 2.0]]
        assert not batch["weights"].requires_grad

    @pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.uint32, np.uint64])
    def test_any_integer_becomes_int64(self, dtype: Any) -> None:
        ids = np.array([1, 200], dtype=dtype)
        batch = collate([{"input_ids": ids, "token_type_ids": ids}], pad_to_multiple_of=3)
        assert batch["token_type_ids"].dtype == batch["input_ids"].dtype == torch.int64
        assert batch["token_type_ids"].tolist() == [[1, 200, 0]]

    def test_column_numbers_to_numpy_too(self) -> None:
        batch = collate([{"input_ids": [1, 2], "weights": [0.5, 1.0]}], return_tensors="np")
        assert batch["weights"].dtype == np.float32
        assert batch["weights"].shape == (1, 2)


class TestAttentionMask:
    def test_ones_are_dropped(self) -> None:
        assert_same(collate(MASKED), collate(LABELLED))

    @pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)
    def test_masked_tokens_leave_every_key(self, container: Any) -> None:
        padded = [
            {
                "input_ids": [0, 0, 5, 6],
                "labels": [-100, -100, 5, 6],
                "w": [0, 0, 3, 4],
                "attention_mask": [0, 0, 1, 1],
            },
            {"input_ids": [7, 8, 9, 0], "labels": [7, 8, 9, -100], "w": [1, 2, 3, 0], "attention_mask": [1, 1, 1, 0]},
        ]
        unpadded = [
            {"input_ids": [5, 6], "labels": [5, 6], "w": [3, 4]},
            {"input_ids": [7, 8, 9], "labels": [7, 8, 9], "w": [1, 2, 3]},
        ]
        features = [{key: container(value) for key, value in example.items()} for example in padded]
        assert_same(collate(features, return_flash_attn_kwargs=True), collate(unpadded, return_flash_attn_kwargs=True))

    def test_given_position_ids_are_cut_too(self) -> None:
        example = {"input_ids": [0, 5, 6], "position_ids": [1, 0, 1], "attention_mask": [0, 1, 1]}
        assert collate([example])["position_ids"].tolist() == [[0, 1]]

    def test_may_be_in_some_examples_only(self) -> None:
        features = [{"input_ids": [0, 5], "attention_mask": [False, True]}, {"input_ids": [6, 7]}]
        assert collate(features)["input_ids"].tolist() == [[5, 6, 7]]

    def test_nothing_left(self) -> None:
        with pytest.raises(CollatorError, match=r"only example.*came without tokens, or with none that the attention_"):
            collate([{"input_ids": [1, 2], "attention_mask": [0, 0]}])

    def test_document_numbers(self) -> None:
        with pytest.raises(CollatorError, match=r"example 0: attention_mask holds other numbers than 0 and 1"):
            collate([{"input_ids": [1, 2, 3], "attention_mask": [1, 1, 2]}])


class TestPositionIds:
    def test_kept(self) -> None:
        features = [
            {"input_ids": [1, 2, 3], "position_ids": [4, 5, 6]},
            {"input_ids": [4, 5], "position_ids": torch.tensor([0, 1], dtype=torch.int32)},
        ]
        batch = collate(features, position_ids_start=2, return_flash_attn_kwargs=True)
        assert batch["position_ids"].tolist() == [[4, 5, 6, 0, 1]]
        assert batch["position_ids"].dtype == torch.int64
        assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5]

    def test_not_returned_if_not_wanted(self) -> None:
        assert "position_ids" not in collate([{"input_ids": [1], "position_ids": [4]}], return_position_ids=False)

    def test_restarting_inside_an_example_makes_documents(self) -> None:
        features = [
            {"input_ids": [1, 2, 3, 4, 5], "position_ids": [0, 1, 0, 1, 2]},
            {"input_ids": [6], "position_ids": [0]},
        ]
        batch = collate(features, return_flash_attn_kwargs=True, return_seq_idx=True)
        assert batch["cu_seq_lens_q"].tolist() == [0, 2, 5, 6]
        assert batch["seq_idx"].tolist() == [[0, 0, 1, 1, 1, 2]]
        assert batch["labels"].tolist() == [[-100, 2, -100, 4, 5, -100]]
        assert batch["max_length_q"] == 3

    def test_that_go_on_over_a_start_need_it_said_outright(self) -> None:
        features = [{"input_ids": [1, 2], "position_ids": [0, 1]}, {"input_ids": [3, 4], "position_ids": [2, 3]}]
        with pytest.raises(CollatorError, match=r"position_ids go on from 1 to 2 where example 1 .* starts"):
            collate(features)
        batch = collate(features, return_flash_attn_kwargs=True)
        assert batch["position_ids"].tolist() == [[0, 1, 2, 3]]
        assert batch["cu_seq_lens_q"].tolist() == [0, 2, 4]

    @pytest.mark.parametrize("start", [0, 1, 2])
    def test_made_ones_always_show_the_documents(self, start: int) -> None:
        features = [{"input_ids": [1] * length} for length in (1, 1, 2, 1, 3, 3, 1)]
        batch = collate(features, position_ids_start=start, return_flash_attn_kwargs=True, pad_to_multiple_of=5)
        assert boundaries(batch["position_ids"]).cu_seqlens.tolist() == batch["cu_seq_lens_q"].tolist()


class TestPadding:
    def test_is_a_document_of_its_own(self) -> None:
        features = [{**example, "w": [0.5] * len(example["input_ids"])} for example in LABELLED]
        batch = collate(
            features,
            pad_to_multiple_of=4,
            pad_token_id=99,
            position_ids_start=1,
            separator_id=-7,
            return_flash_attn_kwargs=True,
            return_seq_idx=True,
        )
        assert values(batch) == {
            "input_ids": [[5, 6, 7, 8, 9, 10, 99, 99]],
            "labels": [[-7, 60, 70, -7, -7, -100, -100, -100]],
            "position_ids": [[1, 2, 3, 1, 1, 2, 1, 2]],
            "seq_idx": [[0, 0, 0, 1, 2, 2, 3, 3]],
            "cu_seq_lens_q": [0, 3, 4, 6, 8],
            "cu_seq_lens_k": [0, 3, 4, 6, 8],
            "max_length_q": 3,
            "max_length_k": 3,
            "w": [[0.5] * 6 + [0.0] * 2],
            "real_tokens": [[1, 1, 1, 1, 1, 1, 0, 0]],
        }

    def test_without_labels_is_not_learned(self) -> None:
        assert collate([{"input_ids": [1, 2]}], pad_to_multiple_of=4)["labels"].tolist() == [[-100, 2, -100, -100]]

    def test_counts_for_max_length(self) -> None:
        batch = collate([{"input_ids": [1]}], pad_to_multiple_of=4, return_flash_attn_kwargs=True)
        assert batch["max_length_q"] == batch["max_length_k"] == 3

    @pytest.mark.parametrize("multiple", [1, 2, 3, 6])
    def test_not_added_to_a_full_row(self, multiple: int) -> None:
        options = {"return_flash_attn_kwargs": True, "return_seq_idx": True}
        full = collate(LABELLED, pad_to_multiple_of=multiple, **options)
        assert full.pop("real_tokens").tolist() == [[1] * 6]  # every batch of a loader has the same keys
        assert_same(full, collate(LABELLED, **options))

    def test_counts_what_the_mask_left(self) -> None:
        example = {"input_ids": [1, 2, 0, 0], "attention_mask": [1, 1, 0, 0]}
        assert collate([example], pad_to_multiple_of=3)["input_ids"].tolist() == [[1, 2, 0]]

    def test_after_given_position_ids(self) -> None:
        batch = collate([{"input_ids": [1, 2], "position_ids": [7, 8]}], pad_to_multiple_of=4)
        assert batch["position_ids"].tolist() == [[7, 8, 0, 1]]


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ([], "expected at least one example, found an empty batch"),
        ([{"input_ids": []}, {"input_ids": []}], "all 2 examples of the batch came without tokens"),
        ([{"input_ids": torch.tensor([])}], "the only example of the batch came without tokens"),
        ([{"text": "hello", "labels": [1]}], "example 0: input_ids missing, found text, labels."),
        ([{}], "example 0: input_ids missing, found no keys."),
        ([[1, 2]], "example 0: expected a mapping, found list."),
        ({"input_ids": [[1, 2]]}, "expected a list of examples, found a dict of input_ids. Give one mapping for each"),
        (
            [{"input_ids": [1], "w": [1]}, {"input_ids": [1, 2, 3], "w": [1, 2]}],
            "example 1: w has length 2, but input_ids has length 3.",
        ),
        ([{"input_ids": [1, 2], "labels": [1]}], "example 0: labels has length 1, but input_ids has length 2."),
        (
            [{"input_ids": [1, 2], "attention_mask": [1]}],
            "example 0: attention_mask has length 1, but input_ids has length 2.",
        ),
        (
            [{"input_ids": [1]}, {"input_ids": [1], "w": [1]}, {"input_ids": [1]}],
            "w is in only some examples: example 0 is without it (2 of 3 are).",
        ),
        (
            [{"input_ids": [1], "labels": [1]}, {"input_ids": [1], "labels": None}],
            "labels is in only some examples: example 1 is without it (1 of 2 are).",
        ),
        (
            [{"input_ids": [1, 2], "labels": 1}],
            "example 0: labels is the single number 1. A packed row needs token-level",
        ),
        ([{"input_ids": [1, 2], "labels": 1}], "set document_labels=True"),
        ([{"input_ids": [1, 2], "label": 1}], "label is the single number 1. A packed row needs token-level"),
        ([{"input_ids": [1, 2], "label_ids": np.float32(1)}], "set document_labels=True"),
        ([{"input_ids": [1, 2], "label": [1]}], "If these are labels of documents, set document_labels=True"),
        ([{"input_ids": [1, 2], "labels": torch.tensor(3)}], "labels is the single number 3"),
        ([{"input_ids": [1, 2], "labels": np.int64(3)}], "labels is the single number 3"),
        ([{"input_ids": [1, 2], "idx": 4}], "example 0: idx must be one number per token, found shape ()."),
        (
            [{"input_ids": torch.ones(1, 4).long()}],
            "found shape (1, 4). These are rows of a batch. Tokenize each text by itself",
        ),
        ([{"input_ids": [[1, 2], [3]]}], "These are lists of several examples. Tokenize each text by itself"),
        (["a text"], "example 0: expected a mapping, found str. Text is tokenized first"),
        ([torch.tensor([1])], 'Token ids alone are an example as {"input_ids": ids}.'),
        ([{"input_ids": [1, 2], "w": "ab"}], "example 0: w holds no plain numbers (str of <U2)."),
        ([{"input_ids": [1, 2], "w": [1, None]}], "example 0: w holds no plain numbers (list of object)."),
        ([{"input_ids": [1, 2], "w": [[1], [2, 3]]}], "example 0: w "),
        ([{"input_ids": [1.5, 2.0]}], "example 0: input_ids must be integers, found floats."),
        ([{"input_ids": [1], "labels": [1.0]}], "example 0: labels must be integers, found floats."),
        ([{"input_ids": [1], "seq_idx": [0]}], "example 0: seq_idx is made by the collator."),
        ([{"input_ids": [1], "real_tokens": [1]}], "example 0: real_tokens is made by the collator."),
    ],
)
def test_errors(features: Any, message: str) -> None:
    with pytest.raises(CollatorError) as caught:
        collate(features)
    assert message in str(caught.value)
    assert isinstance(caught.value, Fa2PatchError)
    assert isinstance(caught.value, ValueError)


MASKS = ("completion_mask", "assistant_masks")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of: expected a positive number.*0"),
        ({"pad_to_multiple_of": -8}, "pad_to_multiple_of: expected a positive number.*-8"),
        ({"loss_masks": "completion_mask"}, "loss_masks: expected names"),
        ({"loss_masks": 5}, "loss_masks: expected names of columns, found 5"),
        ({"return_tensors": True}, "return_tensors: expected 'pt' or 'np', found True. All options are named"),
        ({"separator_id": list(range(99))}, "separator_id: expected an integer, found an object of class list"),
        ({"loss_masks": MASKS, "document_labels": True}, "leave them out"),
        ({"loss_weights": "tokens"}, "loss_weights: expected 'document', 'token' or None, found 'tokens'"),
        ({"loss_weights": "document", "document_labels": True}, "leave them out with document_labels=True"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CollatorError, match=message):
        DataCollatorWithFlattening(**options)


def test_a_tokenizer_is_no_option() -> None:
    with pytest.raises(CollatorError, match="found an object of class Tokenizer.*none of them is a tokenizer"):
        DataCollatorWithFlattening(type("Tokenizer", (), {"__repr__": lambda self: "a" * 99})())


def test_the_columns_of_a_batch_become_examples_as_the_error_says() -> None:
    batch = {"input_ids": torch.tensor([[1, 2], [3, 0]]), "attention_mask": torch.tensor([[1, 1], [1, 0]])}
    rows = [dict(zip(batch, values)) for values in zip(*batch.values())]
    assert collate(rows)["input_ids"].tolist() == [[1, 2, 3]]


@pytest.mark.parametrize(("options", "call"), [({"return_tensors": "tf"}, {}), ({}, {"return_tensors": "tf"})])
def test_unknown_return_tensors(options: dict[str, Any], call: dict[str, Any]) -> None:
    with pytest.raises(CollatorError, match="return_tensors: expected 'pt' or 'np', found 'tf'"):
        DataCollatorWithFlattening(**options)(PLAIN, **call)


def test_documents_round_trip() -> None:
    hypothesis = pytest.importorskip("hypothesis")
    st = pytest.importorskip("hypothesis.strategies")
    containers = st.sampled_from([list, np.array, torch.tensor])
    token = st.tuples(
        st.integers(0, 2**31), st.integers(-100, 2**31), st.integers(0, 1), st.floats(width=32, allow_nan=False)
    )
    documents = st.lists(st.lists(token, min_size=1, max_size=9), min_size=1, max_size=6)

    @hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @hypothesis.given(documents, containers, st.integers(0, 3), st.sampled_from([None, 1, 4, 7]))
    def check(documents: Any, container: Any, start: int, multiple: int | None) -> None:
        keys = ("input_ids", "labels", "completion_mask", "weights")
        features = [{key: list(column) for key, column in zip(keys, zip(*document))} for document in documents]
        batch = collate(
            [{key: container(column) for key, column in example.items()} for example in features],
            position_ids_start=start,
            pad_to_multiple_of=multiple,
            return_flash_attn_kwargs=True,
            return_seq_idx=True,
        )
        cu = batch["cu_seq_lens_q"]
        assert torch.equal(cu, boundaries(batch["position_ids"]).cu_seqlens)
        assert torch.equal(cu, batch["cu_seq_lens_k"])
        assert batch["max_length_q"] == batch["max_length_k"] == int(cu.diff().max())
        assert batch["input_ids"].shape[1] % (multiple or 1) == 0
        split = {
            key: [part.tolist() for part in batch[key][0].tensor_split(cu[1:-1].long())]
            for key in (*keys, "position_ids", "seq_idx")
        }
        assert len(split["input_ids"]) - len(features) == (cu[-1] > sum(map(len, documents)))
        for number, example in enumerate(features):
            length = len(example["input_ids"])
            expected = {
                **example,
                "labels": [-100, *example["labels"][1:]],
                "position_ids": list(range(start, start + length)),
                "seq_idx": [number] * length,
            }
            assert {key: split[key][number] for key in expected} == expected
        for padding in split["labels"][len(features) :]:
            assert set(padding) == {-100}

    check()
