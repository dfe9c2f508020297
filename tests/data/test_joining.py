"""Examples that are alike are read as one long example. Any others give the same batch, and errors name the example."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fa2patch
from fa2patch.data import columns as module
from fa2patch.errors import CollatorError

LENGTHS = (3, 1, 2, 5)
CONTAINERS = {
    "lists": list,
    "tuples": tuple,
    "arrays": np.array,
    "int32 arrays": lambda values: np.array(values, dtype=np.int32),
    "tensors": torch.tensor,
}


def examples(*containers: Any) -> list[dict[str, Any]]:
    """Return examples of all columns, each in one of the containers."""
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


def collate(features: Any, **options: Any) -> dict[str, Any]:
    options = {"loss_masks": ("completion_mask",), "return_flash_attn_kwargs": True, "pad_to_multiple_of": 4, **options}
    return fa2patch.DataCollatorWithFlattening(**options)(features)


def listed(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: getattr(values, "tolist", lambda values=values: values)() for name, values in batch.items()}


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of functions that read values, once for each call."""
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
def test_each_column_of_examples_that_are_alike_is_read_once(container: Any, called: list[str]) -> None:
    features = examples(container)
    collate(features)
    assert sorted(called) == ["as_numbers"] * len(features[0]) + ["boundaries"]


def test_documents_are_not_looked_for_where_each_example_is_one(called: list[str]) -> None:
    collate([{"input_ids": [1, 2]}, {"input_ids": [3]}])
    assert called == ["as_numbers"]


@pytest.mark.parametrize("first", CONTAINERS.values(), ids=CONTAINERS)
@pytest.mark.parametrize("second", CONTAINERS.values(), ids=CONTAINERS)
def test_examples_of_two_kinds_give_the_same_batch(first: Any, second: Any) -> None:
    assert listed(collate(examples(first, second))) == listed(collate(examples(list)))


@pytest.mark.parametrize(
    ("column", "dtype"),
    [
        ([[1, 2], [True, False]], torch.int64),
        ([[0.5, 1.0], [1, 2]], torch.float32),
        ([np.array([0.5, 2.0], dtype=np.float16), torch.tensor([1, 2])], torch.float32),
        ([np.array([1, 2], dtype=np.uint64), np.array([-1, 3])], torch.int64),
    ],
)
def test_a_further_column_of_several_dtypes(column: Any, dtype: torch.dtype) -> None:
    batch = collate([{"input_ids": [1, 2], "further": values} for values in column], pad_to_multiple_of=None)
    assert batch["further"].dtype == dtype
    assert batch["further"].tolist() == [[float(value) for values in column for value in values]]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({1: {"input_ids": [True, True]}}, "example 1: input_ids must be integers, found booleans"),
        ({1: {"input_ids": [1.0, 2.0]}}, "example 1: input_ids must be integers, found floats"),
        ({2: {"input_ids": [2**63]}}, "example 2: input_ids must fit into int64"),
        ({2: {"input_ids": [[1], [2]]}}, "example 2: input_ids must be one number per token, found shape"),
        ({1: {"input_ids": []}, 2: {"input_ids": ["x"]}}, "example 1: no token. Remove"),
        ({1: {"attention_mask": [0, 0]}, 2: {"attention_mask": [1, 2]}}, "example 1: no token that its attention_mask"),
        ({1: {"attention_mask": [1, 2]}, 2: {"attention_mask": [0, 0]}}, "example 1: attention_mask holds other"),
        ({2: {"seq_lengths": [1]}}, "example 2: seq_lengths must be its documents' lengths"),
        ({0: {"seq_lengths": [2, 1]}, 1: {"seq_lengths": [1]}}, "example 0: seq_lengths must be its documents'"),
        ({1: {"labels": [1]}, 2: {"labels": [1, 2, 3]}}, "example 1: labels has length 1"),
    ],
)
def test_the_first_wrong_example_is_named(wrong: Any, message: str) -> None:
    right = {"input_ids": [1, 2], "labels": [1, 2], "attention_mask": [1, 1], "seq_lengths": [1, 1]}
    if any("input_ids" in columns for columns in wrong.values()):
        right = {"input_ids": [1, 2]}
    with pytest.raises(CollatorError, match=message):
        collate([{**right, **wrong.get(index, {})} for index in range(3)])


@pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)
@pytest.mark.parametrize("count", [1, 4])
def test_a_batch_shares_no_memory_with_examples_or_in_itself(container: Any, count: int) -> None:
    features = examples(container)[:count]
    given = [np.asarray(values) for example in features for values in example.values()]
    options = {"return_seq_idx": True, "loss_weights": "document", "pad_to_multiple_of": None}
    made = [values for values in collate(features, return_tensors="np", **options).values() if hasattr(values, "shape")]
    for index, values in enumerate(made):
        assert not any(np.shares_memory(values, other) for other in [*given, *made[index + 1 :]])


def test_tensors_are_on_torchs_default_device() -> None:
    with torch.device("meta"):
        batch = collate(examples(list))
    assert {values.device.type for values in batch.values() if isinstance(values, torch.Tensor)} == {"meta"}


def test_a_column_has_one_dtype_padded_and_packed() -> None:
    features = [{"input_ids": [1, 2], "weights": [1, 0]}, {"input_ids": [1, 3], "weights": [0.5, 1.0]}]
    for padding_free in (False, True):
        batch = fa2patch.DataCollatorForCompletionOnlyLM([1], padding_free=padding_free)(features)
        assert batch["weights"].dtype == torch.float32
