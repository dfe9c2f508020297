"""Examples as columns: one int64 or float32 number per token, without masked tokens."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..documents.names import LENGTHS, REAL
from ..documents.recognition import boundaries
from ..errors import CollatorError
from .joining import joined

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
    if not isinstance(feature, (dict, Mapping)):  # dict is asked first: an abstract class takes longer to answer
        raise CollatorError(f"example {index}: expected a mapping, found {type(feature).__name__}.")
    return {key: value for key, value in feature.items() if value is not None}


@dataclass
class Flat:
    """The columns of examples end to end, without masked tokens.

    Attributes:
        columns: int64 or float32 arrays ``[tokens]`` of all examples.
        lengths: The tokens of each example.
    """

    columns: Columns
    lengths: list[int]

    def examples(self) -> list[Columns]:
        """Return the columns of each example, as views."""
        parts = [slice(end - length, end) for length, end in zip(self.lengths, accumulate(self.lengths))]
        return [{key: values[part] for key, values in self.columns.items()} for part in parts]


def read_all(features: Iterable[Mapping[str, Any]], position_ids_start: int = 0) -> Flat:
    """Return the columns of all examples end to end, in new arrays. Each example is read as :func:`read` says.

    Raises:
        CollatorError: There are no examples, one cannot be read, or a key is in only some of them.
    """
    features = list(features)
    try:
        found = joined([given(*each) for each in enumerate(features)]) if features else None
        if found is not None:
            return _checked(0, *found, position_ids_start)
    except CollatorError:
        pass  # The examples are read one by one, because an error names the first wrong one.
    examples = [read(index, feature, position_ids_start) for index, feature in enumerate(features)]
    if not examples:
        raise CollatorError("expected at least one example, found an empty batch.")
    require_same_keys(examples)
    columns = {key: concatenate([example[key] for example in examples]) for key in examples[0]}
    return Flat(columns, [len(example["input_ids"]) for example in examples])


def read(index: int, feature: Mapping[str, Any], position_ids_start: int = 0) -> Columns:
    """Return an example's columns without masked tokens, each int64 or float32 ``[tokens]``.

    ``seq_lengths`` is replaced by ``position_ids`` that restart at ``position_ids_start`` in each document.

    Raises:
        CollatorError: ``input_ids`` are missing, a column is not one number per token, a column is made by the
            collator, ``seq_lengths`` are wrong, or no token is visible in the ``attention_mask``.
    """
    return _checked(index, given(index, feature), None, position_ids_start).columns


def _checked(index: int, found: dict[str, Any], lengths: Mapping[str, list[int]] | None, start: int) -> Flat:
    """Check and convert an example, or all examples end to end.

    Args:
        index: The index of the example, for errors.
        found: The values of each key.
        lengths: The number of values of each key in each of the examples that :func:`.joining.joined` has joined; None
            for an example as it is. An error then names a wrong example.
        start: The first position id of each document of ``seq_lengths``.
    """
    if "input_ids" not in found:
        raise CollatorError(f"example {index}: input_ids missing, found {', '.join(map(str, found)) or 'no keys'}.")
    for key in (*LENGTHS, REAL):
        if key in found:
            raise CollatorError(f"example {index}: {key} is made by the collator. Remove it from the examples.")
    arrays = {key: as_array(index, key, found[key], lengths is None) for key in found if key != "seq_lengths"}
    tokens = len(arrays["input_ids"])
    parts = {key: [len(values)] for key, values in arrays.items()} if lengths is None else lengths
    for key, values in arrays.items():
        if parts[key] != parts["input_ids"]:
            raise CollatorError(
                f"example {index}: {key} has length {len(values)}, but input_ids has length {tokens}. "
                "Every key needs one number per token."
            )
    for key in IDS:
        if tokens and key in arrays and arrays[key].dtype != np.int64:
            raise CollatorError(f"example {index}: {key} must be integers, found floats.")
    flat = Flat(arrays, parts["input_ids"])
    if "seq_lengths" in found:
        of_documents = as_array(index, "seq_lengths", found["seq_lengths"])
        _set_positions(index, flat, of_documents, parts.get("seq_lengths", [len(of_documents)]), start)
    return _without_masked(index, flat)


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


def as_array(index: int, key: str, value: Any, copy: bool = True) -> Array:
    """Return an int64 or float32 array ``[length]``, a new one unless ``copy`` is False.

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
    return array.astype(np.float32 if array.dtype.kind == "f" else np.int64, copy=copy)


def require_same_keys(examples: Sequence[Mapping[str, Any]]) -> None:
    """Raise :class:`CollatorError` if a key is in only some of the examples."""
    for key in sorted(set().union(*examples), key=str):
        without = [index for index, example in enumerate(examples) if key not in example]
        if without:
            raise CollatorError(
                f"{key} is in only some examples: example {without[0]} is without it ({len(without)} of "
                f"{len(examples)} are). Give it to all of them or to none."
            )


def require_visible_starts(position_ids: Array, lengths: Sequence[int]) -> None:
    """Raise :class:`CollatorError` if the position ids of an example continue those of the example before it.

    Args:
        position_ids: int64 ``[tokens]`` of all examples.
        lengths: The tokens of each example.
    """
    starts = ends(lengths)[:-1]
    left, right = position_ids[starts - 1], position_ids[starts]
    hidden = np.flatnonzero(right == left + 1)
    if len(hidden):
        at = hidden[0]
        raise CollatorError(
            f"position_ids go on from {left[at]} to {right[at]} where example {at + 1} (or the padding) "
            "starts, which hides that start. Let them restart, or set return_flash_attn_kwargs=True."
        )


def document_lengths(position_ids: Array, lengths: Sequence[int]) -> list[int]:
    """Return the tokens of each document.

    Args:
        position_ids: int64 ``[tokens]`` of all examples.
        lengths: The tokens of each example. A document ends where its example does.
    """
    found = boundaries(torch.from_numpy(position_ids)).lengths
    lengths_found: list[int] = np.diff(np.union1d(ends(found), ends(lengths)), prepend=0).tolist()
    return lengths_found


def ends(lengths: Sequence[int]) -> Array:
    """Return the end of each of the parts that have these lengths, int64 ``[parts]``."""
    return np.array(list(accumulate(lengths)), dtype=np.int64)


def starts(lengths: Sequence[int]) -> Array:
    """Return the start of each of the parts that have these lengths, int64 ``[parts]``."""
    return np.array([0, *accumulate(lengths[:-1])], dtype=np.int64)


def concatenate(arrays: Sequence[Array]) -> Array:
    """Concatenate int64 and float32 columns; the result is float32 if any of them is."""
    whole = np.concatenate(arrays)
    return whole.astype(np.float32, copy=False) if whole.dtype.kind == "f" else whole


def counted(lengths: Sequence[int], start: int) -> Array:
    """Return position ids int64 ``[tokens]`` that count up from ``start`` in each document."""
    longest = np.arange(start, start + max(lengths), dtype=np.int64)
    return np.concatenate([longest[:length] for length in lengths])


def _set_positions(index: int, flat: Flat, documents: Array, counts: Sequence[int], start: int) -> None:
    """Set the ``position_ids`` of documents with these lengths, or compare them with those that are there.

    Args:
        index: The index of the example, for errors.
        flat: The examples, with masked tokens.
        documents: The lengths of the documents of all examples.
        counts: The number of documents of each example.
        start: The first position id of each document.
    """
    if documents.dtype != np.int64 or not _add_up(documents, counts, flat.lengths):
        raise CollatorError(
            f"example {index}: seq_lengths must be its documents' lengths, positive integers that add up to its "
            f"{sum(flat.lengths)} tokens; found {documents.tolist()}."
        )
    stated: list[int] = documents.tolist()
    if "position_ids" not in flat.columns:
        flat.columns["position_ids"] = counted(stated, start)
        return
    found = document_lengths(flat.columns["position_ids"], flat.lengths)
    if found != stated:
        raise CollatorError(
            f"example {index}: seq_lengths says {stated}, position_ids says {found}. "
            "Let both describe the same documents, or pass only one of them."
        )


def _add_up(documents: Array, counts: Sequence[int], lengths: Sequence[int]) -> bool:
    """Return whether positive lengths of documents, so many in each example, add up to each example's length."""
    if not all(counts) or documents.min() < 1:
        return False
    return np.array_equal(np.add.reduceat(documents, starts(counts)), lengths)


def numbers_of_parts(parts: Sequence[int], wholes: Sequence[int]) -> list[int]:
    """Return the number of parts in each whole, where both are given by their lengths and a whole ends with a part."""
    numbers: list[int] = np.diff(np.searchsorted(ends(parts), ends(wholes)), prepend=-1).tolist()
    return numbers


def _without_masked(index: int, flat: Flat) -> Flat:
    mask = flat.columns.pop("attention_mask", None)
    hint = " that its attention_mask shows" if mask is not None and len(mask) else ""
    if mask is not None and all(flat.lengths):
        shown = mask == 1
        tokens = np.count_nonzero(shown)
        if tokens != np.count_nonzero(mask):
            raise CollatorError(
                f"example {index}: attention_mask holds other numbers than 0 and 1. Pass packed documents as one "
                "example each, or say where they start by position_ids."
            )
        if tokens < len(mask):
            lengths = np.add.reduceat(shown, starts(flat.lengths), dtype=np.int64).tolist()
            flat = Flat({key: values[shown] for key, values in flat.columns.items()}, lengths)
    if not all(flat.lengths):
        raise CollatorError(f"example {index}: no token{hint}. Remove empty examples from the dataset.")
    return flat
