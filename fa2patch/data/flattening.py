"""Examples as columns: one int64 or float32 number per token, without masked tokens."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..documents.names import LENGTHS
from ..documents.recognition import boundaries
from ..errors import CollatorError

Array = npt.NDArray[Any]
Columns = dict[str, Array]

IDS = ("input_ids", "labels", "position_ids")


def integer(name: str, value: Any) -> int:
    """Return an option as an int.

    Raises:
        CollatorError: It is not an integer, or not below 2**62 in size: positions counted up from it must fit int64.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise CollatorError(f"{name}: expected an integer, found {value!r}.") from None
    if abs(number) >= 2**62:
        raise CollatorError(f"{name}: expected an integer of at most 62 bits, found {number}.")
    return number


def given(index: int, feature: Mapping[str, Any]) -> dict[str, Any]:
    """Return the items of an example whose value is not None."""
    if not isinstance(feature, Mapping):
        raise CollatorError(f"example {index}: expected a mapping, found {type(feature).__name__}.")
    return {key: value for key, value in feature.items() if value is not None}


def read(index: int, feature: Mapping[str, Any], position_ids_start: int = 0) -> Columns:
    """Return an example's columns without masked tokens, each int64 or float32 ``[tokens]``.

    ``seq_lengths`` is replaced by ``position_ids`` that restart at ``position_ids_start`` in each document.

    Raises:
        CollatorError: ``input_ids`` are missing, a column is not one number per token, a column is made by the
            collator, ``seq_lengths`` are wrong, or no token is visible in the ``attention_mask``.
    """
    found = given(index, feature)
    if "input_ids" not in found:
        raise CollatorError(f"example {index}: input_ids missing, found {', '.join(map(str, found)) or 'no keys'}.")
    for key in LENGTHS:
        if key in found:
            raise CollatorError(f"example {index}: {key} is made by the collator. Remove it from the examples.")
    lengths = found.pop("seq_lengths", None)
    columns = {key: as_array(index, key, value) for key, value in found.items()}
    length = len(columns["input_ids"])
    for key, values in columns.items():
        if len(values) != length:
            raise CollatorError(
                f"example {index}: {key} has length {len(values)}, but input_ids has length {length}. "
                "Every key needs one number per token."
            )
    for key in IDS:
        if length and key in columns and columns[key].dtype != np.int64:
            raise CollatorError(f"example {index}: {key} must be integers, found floats.")
    if lengths is not None:
        _set_positions(index, columns, as_array(index, "seq_lengths", lengths), position_ids_start)
    return _drop_masked(index, columns)


def as_numbers(index: int, key: str, value: Any, what: str = "one number per token") -> Array:
    """Return booleans, integers or floats of any shape as an array.

    Raises:
        CollatorError: The value holds anything else, or an integer does not fit into int64.
    """
    if isinstance(value, torch.Tensor):
        if value.device.type == "meta" or value.layout != torch.strided or value.is_nested:
            kind = "on the meta device" if value.device.type == "meta" else f"of layout {value.layout}"
            raise CollatorError(f"example {index}: {key} must be {what}, found a tensor {kind}.")
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value).numpy()
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise CollatorError(f"example {index}: {key} is not {what} ({error}).") from error
    if array.dtype.kind not in "biuf":
        raise CollatorError(
            f"example {index}: {key} holds no plain numbers ({type(value).__name__} of {array.dtype}). "
            f"Remove what is not {what} from the examples."
        )
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise CollatorError(f"example {index}: {key} must fit into int64, found {array.max()}.")
    return array


def as_array(index: int, key: str, value: Any) -> Array:
    """Return a new int64 or float32 array ``[length]``.

    Raises:
        CollatorError: The value is not one number per token, or ``key`` is one of :data:`IDS` and holds booleans.
    """
    array = as_numbers(index, key, value)
    if array.dtype.kind == "b" and key in IDS:
        raise CollatorError(f"example {index}: {key} must be integers, found booleans.")
    if array.ndim == 0 and key == "labels":
        raise CollatorError(
            f"example {index}: labels is the single number {array}. A packed row needs token-level labels, "
            "one per token of input_ids; for one label per document set document_labels=True."
        )
    if array.ndim != 1:
        raise CollatorError(f"example {index}: {key} must be one number per token, found shape {array.shape}.")
    return array.astype(np.float32 if array.dtype.kind == "f" else np.int64)


def require_same_keys(examples: Sequence[Mapping[str, Any]]) -> None:
    """Raise :class:`CollatorError` if a key is in only some of the examples."""
    for key in sorted(set().union(*examples), key=str):
        without = [index for index, example in enumerate(examples) if key not in example]
        if without:
            raise CollatorError(
                f"{key} is in only some examples: example {without[0]} is without it ({len(without)} of "
                f"{len(examples)} are). Give it to all of them or to none."
            )


def require_visible_starts(examples: Sequence[Columns]) -> None:
    """Raise :class:`CollatorError` if the position ids of an example continue those of the example before it."""
    positions = [example["position_ids"] for example in examples]
    for index, (left, right) in enumerate(zip(positions, positions[1:]), start=1):
        if int(right[0]) == int(left[-1]) + 1:
            raise CollatorError(
                f"position_ids go on from {left[-1]} to {right[0]} where example {index} (or the padding) "
                "starts, which hides that start. Let them restart, or set return_flash_attn_kwargs=True."
            )


def document_lengths(example: Columns) -> tuple[int, ...]:
    """Return the lengths of an example's documents, in tokens, from its ``position_ids``."""
    return boundaries(torch.tensor(example["position_ids"])).lengths


def concatenate(arrays: Sequence[Array]) -> Array:
    """Concatenate int64 and float32 columns; the result is float32 if any of them is."""
    joined = np.concatenate(arrays)
    return joined.astype(np.float32) if joined.dtype.kind == "f" else joined


def counted(lengths: Sequence[int], start: int) -> Array:
    """Return position ids int64 ``[tokens]`` that count up from ``start`` in each document."""
    return np.concatenate([np.arange(start, start + length, dtype=np.int64) for length in lengths])


def _set_positions(index: int, columns: Columns, lengths: Array, start: int) -> None:
    total = len(columns["input_ids"])
    if lengths.dtype != np.int64 or not len(lengths) or (lengths < 1).any() or lengths.sum() != total:
        raise CollatorError(
            f"example {index}: seq_lengths must be its documents' lengths, positive integers that add up to its "
            f"{total} tokens; found {lengths.tolist()}."
        )
    if "position_ids" not in columns:
        columns["position_ids"] = counted(lengths.tolist(), start)
    elif document_lengths(columns) != tuple(lengths.tolist()):
        raise CollatorError(
            f"example {index}: seq_lengths says {lengths.tolist()}, position_ids says "
            f"{list(document_lengths(columns))}. Let both describe the same documents, or pass only one of them."
        )


def _drop_masked(index: int, columns: Columns) -> Columns:
    mask = columns.pop("attention_mask", np.ones_like(columns["input_ids"]))
    if not np.isin(mask, (0, 1)).all():
        raise CollatorError(
            f"example {index}: attention_mask holds other numbers than 0 and 1. Pass packed documents as one "
            "example each, or say where they start by position_ids."
        )
    if not mask.any():
        hint = " that its attention_mask shows" if len(mask) else ""
        raise CollatorError(f"example {index}: no token{hint}. Remove empty examples from the dataset.")
    return {key: values[mask != 0] for key, values in columns.items()}
