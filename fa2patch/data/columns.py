"""Examples as columns: one int64 or float32 number per token, without masked tokens."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..documents.find import boundaries, counts_anew
from ..documents.names import LENGTHS, MEDIA, REAL
from ..errors import CollatorError

Array = npt.NDArray[Any]
Columns = dict[str, Array]

IDS = ("input_ids", "labels", "position_ids")

# Transformers' collators take an example's label under each of these names.
LABELS = ("labels", "label", "label_ids")

_ONE_BY_ONE = "Tokenize each text by itself, without return_tensors: [tokenizer(text) for text in texts]."


@dataclass
class Flat:
    """The columns of examples end to end, without masked tokens."""

    columns: Columns  # int64 or float32 [tokens]
    lengths: list[int]  # the tokens of each example
    # the numbers in the batch of the examples that have tokens, which errors name
    kept: list[int] = field(default_factory=list)

    def number_of(self, token: int) -> int:
        # This is the number in the batch of the example that holds a token.
        return self.kept[int(np.searchsorted(ends(self.lengths), token, side="right"))]

    def examples(self) -> list[Columns]:
        parts = [slice(end - length, end) for length, end in zip(self.lengths, accumulate(self.lengths))]
        return [{key: values[part] for key, values in self.columns.items()} for part in parts]


def integer(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise CollatorError(f"{name}: expected an integer, found {shown(value)}.") from None
    if abs(number) >= 2**62:  # positions that count up from it must fit int64
        raise CollatorError(f"{name}: expected an integer of at most 62 bits, found {number}.")
    return number


def shown(value: object) -> str:
    # The repr of a long object, such as a tokenizer, would make an error unreadable.
    text = repr(value)
    return text if len(text) <= 80 else f"an object of class {type(value).__name__}"


# --- reading examples ------------------------------------------------------------------------------------------------


def present(features: Iterable[Any], bare_ids: bool = False) -> list[dict[str, Any]]:
    # With `bare_ids`, an example may be its token ids alone.
    if isinstance(features, Mapping):
        raise CollatorError(
            f"expected a list of examples, found a {type(features).__name__} of {', '.join(map(str, features))}. Give "
            "one mapping for each example, as [tokenizer(text) for text in texts] makes them, also if there is only "
            "one. The columns of a batch become such a list by "
            "[dict(zip(batch, values)) for values in zip(*batch.values())]."
        )
    if not isinstance(features, Iterable):
        raise CollatorError(f"expected a list of examples, found {type(features).__name__}.")
    if isinstance(features, list) and len(features) == 1 and isinstance(features[0], list):
        row = features[0]  # Trainer makes batches of the rows of packing.stream
        features = row if row and isinstance(row[0], (dict, Mapping)) else features
    examples = []
    for index, feature in enumerate(features):
        # dict is asked first: an abstract class takes longer to answer
        if not isinstance(feature, (dict, Mapping)):
            feature = {"input_ids": _bare(index, feature, bare_ids)}
        examples.append({key: value for key, value in feature.items() if value is not None})
    return examples


def _bare(index: int, feature: object, bare_ids: bool) -> object:
    rows = isinstance(feature, list) and bool(feature) and isinstance(feature[0], (dict, Mapping))
    if bare_ids and not rows and feature is not None and not isinstance(feature, (str, bytes)):
        return feature
    advice = ' Token ids alone are an example as {"input_ids": ids}.'
    if isinstance(feature, (str, bytes)):
        advice = " Text is tokenized first, each by itself: [tokenizer(text) for text in texts]."
    elif rows:
        advice = (
            " A row of packing.stream is a list of examples, and a batch is one row: set batch_size=None or 1 "
            "(per_device_train_batch_size=1 in Trainer), or join the lists of a batch."
        )
    elif feature is None:
        advice = ""
    raise CollatorError(f"example {index}: expected a mapping, found {type(feature).__name__}.{advice}")


def read_examples(examples: Sequence[Mapping[str, Any]], position_ids_start: int) -> Flat:
    # Examples without tokens are left out, as Transformers' DataCollatorWithFlattening does from 5.24 on.
    if not examples:
        raise CollatorError("expected at least one example, found an empty batch.")
    found = _end_to_end(examples)
    if found is not None:
        with contextlib.suppress(CollatorError):  # an error names the first wrong example, so each is read by itself
            flat = _checked(0, *found, position_ids_start)
            if all(flat.lengths):
                flat.kept = list(range(len(examples)))
                return flat
    read = [read_example(index, example, position_ids_start) for index, example in enumerate(examples)]
    kept = with_tokens([len(example["input_ids"]) for example in read])
    read = [read[index] for index in kept]
    require_same_keys(read)
    columns = {key: concatenate(key, [example[key] for example in read]) for key in read[0]}
    return Flat(columns, [len(example["input_ids"]) for example in read], kept)


def with_tokens(lengths: Sequence[int]) -> list[int]:
    kept = [index for index, length in enumerate(lengths) if length]
    if not kept:
        who = f"all {len(lengths)} examples" if len(lengths) > 1 else "the only example"
        raise CollatorError(
            f"expected an example with tokens, but {who} of the batch came without tokens, or with none that the "
            "attention_mask shows. Remove such examples from the dataset: "
            'dataset.filter(lambda example: len(example["input_ids"]) > 0).'
        )
    return kept


def read_example(index: int, example: Mapping[str, Any], position_ids_start: int = 0) -> Columns:
    # `seq_lengths` becomes position_ids that restart at `position_ids_start` in each document. An example may have no
    # tokens, and `seq_lengths` is then left out.
    return _checked(index, example, None, position_ids_start).columns


def _end_to_end(examples: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, list[int]]] | None:
    # A call of NumPy costs about as much for a batch as for an example, so a batch whose examples are alike is
    # converted and checked as if it were one long example. The result is None if numbers might not become what they
    # become example by example: keys, containers or dtypes differ.
    values: dict[str, Any] = {}
    lengths = {}
    try:
        for key in examples[0]:
            parts: list[Any] = [example[key] for example in examples]
            kinds = set(map(type, parts))
            if len(kinds) > 1 or not kinds <= {list, tuple, np.ndarray, torch.Tensor}:
                return None
            tensors = torch.Tensor in kinds
            parts = parts if tensors else [np.asarray(part) for part in parts]
            if len({part.dtype for part in parts}) > 1:
                return None
            values[key] = torch.cat(parts) if tensors else np.concatenate(parts)
            lengths[key] = [part.shape[0] for part in parts]
    except (KeyError, RuntimeError, TypeError, ValueError):
        return None  # a key that one example lacks, lists in lists, shapes or devices that differ
    return (values, lengths) if all(len(example) == len(values) for example in examples) else None


def _checked(index: int, found: Mapping[str, Any], lengths: Mapping[str, list[int]] | None, start: int) -> Flat:
    # `found` holds one example or all examples end to end, with the number of values of each example in `lengths`. If
    # an example has no token, the columns are not examined further.
    if "input_ids" not in found:
        raise CollatorError(f"example {index}: input_ids missing, found {', '.join(map(str, found)) or 'no keys'}.")
    refuse_keys(index, found, (*LENGTHS, REAL))
    _refuse_media(index, found)
    arrays = {
        key: as_array(index, key, value, key in IDS, copy=lengths is None)
        for key, value in found.items()
        if key != "seq_lengths"
    }
    parts = {key: [len(values)] for key, values in arrays.items()} if lengths is None else lengths
    for key, values in arrays.items():
        if parts[key] != parts["input_ids"]:
            raise CollatorError(
                f"example {index}: {key} has length {len(values)}, but input_ids has length "
                f"{len(arrays['input_ids'])}. Every key needs one number per token."
                + (" If these are labels of documents, set document_labels=True." if key in LABELS else "")
            )
    flat = Flat(arrays, parts["input_ids"])
    visible = _visible_tokens(index, flat)
    if not all(flat.lengths):
        return flat
    documents = _seq_lengths(index, flat, found["seq_lengths"], parts) if "seq_lengths" in found else None
    if visible is not None:
        seen = Flat({key: values[visible] for key, values in arrays.items()}, _visible_lengths(visible, flat.lengths))
        if not all(seen.lengths):
            return seen
        if documents is not None:  # they count hidden tokens, positions do not
            documents = _visible_lengths(visible, documents)
        elif "position_ids" in arrays:
            _require_documents(index, flat, visible, start)
        flat = seen
    if documents is not None:
        _set_positions(index, flat, [length for length in documents if length], start)
    return flat


def _seq_lengths(index: int, flat: Flat, value: Any, parts: Mapping[str, list[int]]) -> list[int]:
    documents = as_array(index, "seq_lengths", value)  # masked tokens count
    counts = parts.get("seq_lengths", [len(documents)])
    positive = documents.dtype == np.int64 and all(counts) and documents.min() >= 1
    if not positive or not np.array_equal(np.add.reduceat(documents, starts(counts)), flat.lengths):
        raise CollatorError(
            f"example {index}: seq_lengths must be its documents' lengths, positive integers that add up to its "
            f"{sum(flat.lengths)} tokens; found {documents.tolist()}."
        )
    lengths: list[int] = documents.tolist()
    return lengths


def _set_positions(index: int, flat: Flat, documents: list[int], start: int) -> None:
    if "position_ids" not in flat.columns:
        flat.columns["position_ids"] = restarting(documents, start)
        return
    found = document_lengths(flat.columns["position_ids"], flat.lengths)
    if found != documents:
        raise CollatorError(
            f"example {index}: seq_lengths says {documents}, position_ids says {found}. "
            "Let both describe the same documents, or pass only one of them."
        )


def _visible_tokens(index: int, flat: Flat) -> Array | None:
    mask = flat.columns.pop("attention_mask", None)
    if mask is None:
        return None
    if ((mask != 0) & (mask != 1)).any():
        raise CollatorError(
            f"example {index}: attention_mask holds other numbers than 0 and 1. Pass packed documents as one "
            "example each, or say where they start by position_ids."
        )
    return None if mask.all() else mask == 1


def _visible_lengths(visible: Array, lengths: Sequence[int]) -> list[int]:
    found: list[int] = np.add.reduceat(visible, starts(lengths), dtype=np.int64).tolist()
    return found


def _require_documents(index: int, flat: Flat, visible: Array, start: int) -> None:
    # Behind hidden tokens, a document goes on from the last visible one, or another one starts. If ids have counted
    # hidden tokens too, they jump there. If the hidden tokens are another document's first ones, ids may seem to go on.
    ids, token = flat.columns["position_ids"], np.arange(len(visible))
    (at,) = np.nonzero(visible)
    example = np.searchsorted(ends(flat.lengths), at, side="right")
    behind = (np.diff(at) > 1) & (np.diff(example) == 0)
    left, right = at[:-1][behind], at[1:][behind]
    run = np.maximum.accumulate(np.where(counts_anew(ids, np.roll(ids, 1)), token, 0))  # first token of a run of ids
    first = np.isin(ids, (0, start))
    same = ~counts_anew(ids[right], ids[left]) & ~((run[right] > left) & first[run[right]])
    wrong = np.flatnonzero(~(same | first[right]))
    if len(wrong):
        one, other = left[wrong[0]], right[wrong[0]]
        raise CollatorError(
            f"example {index}: position_ids are {ids[one]} before and {ids[other]} behind tokens that the "
            "attention_mask hides, so without these it is not known whether a document goes on or another one starts. "
            f"Let ids go on to {ids[one] + 1} or restart at {start} there, or pass seq_lengths instead of position_ids."
        )


def refuse_keys(index: int, example: Mapping[str, Any], keys: Sequence[str]) -> None:
    for key in keys:
        if key in example:
            raise CollatorError(f"example {index}: {key} is made by the collator. Remove it from the examples.")


def _refuse_media(index: int, example: Mapping[str, Any]) -> None:
    for key in (key for key in example if key in MEDIA):
        value = example[key]
        numbers = isinstance(value, (list, tuple)) and all(isinstance(each, (int, float)) for each in value)
        dimensions = getattr(value, "ndim", 1 if numbers else 2)
        if dimensions != 1 or len(value) != np.size(example["input_ids"]):
            raise CollatorError(
                f"example {index}: {key} belongs to pictures, films or sound, and this collator joins columns with one "
                "number per token. Use fa2patch.DataCollatorForMultimodalFlattening(model)."
            )


# --- one column ------------------------------------------------------------------------------------------------------


def as_array(index: int, key: str, value: Any, integers: bool = False, copy: bool = True) -> Array:
    # The array is int64 or float32 [length].
    array = as_numbers(index, key, value)
    if array.ndim == 0 and key in LABELS:
        raise CollatorError(
            f"example {index}: {key} is the single number {array}. A packed row needs token-level labels, "
            "one per token of input_ids; for one label per document set document_labels=True "
            "(fa2patch.DataCollatorWithFlattening)."
        )
    if array.ndim != 1:
        batch = " These are rows of a batch. " + _ONE_BY_ONE if array.ndim == 2 else ""
        raise CollatorError(f"example {index}: {key} must be one number per token, found shape {array.shape}.{batch}")
    wrong = {"b": "booleans", "f": "floats"}.get(array.dtype.kind)
    if integers and wrong and len(array):  # NumPy makes floats of an empty list
        raise CollatorError(f"example {index}: {key} must be integers, found {wrong}.")
    return array.astype(np.float32 if array.dtype.kind == "f" and not integers else np.int64, copy=copy)


def as_numbers(index: int, key: str, value: Any, what: str = "one number per token") -> Array:
    if isinstance(value, torch.Tensor):
        if value.device.type == "meta" or value.layout != torch.strided or value.is_nested:
            kind = "on the meta device" if value.device.type == "meta" else f"of layout {value.layout}"
            raise CollatorError(f"example {index}: {key} must be {what}, found a tensor {kind}.")
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() and value.element_size() < 4 else value).numpy()
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        lists = isinstance(value, (list, tuple)) and all(isinstance(one, (list, tuple)) for one in value)
        batch = " These are lists of several examples. " + _ONE_BY_ONE if lists else ""
        raise CollatorError(f"example {index}: {key} is not {what} ({error}).{batch}") from error
    if array.dtype.kind not in "biuf":
        raise CollatorError(
            f"example {index}: {key} holds no plain numbers ({type(value).__name__} of {array.dtype}). "
            f"Remove what is not {what} from the examples."
        )
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise CollatorError(f"example {index}: {key} must fit into int64, found {array.max()}.")
    if array.dtype.kind != "f":
        return array
    with np.errstate(over="ignore"):  # said below
        single = array.astype(np.float32, copy=False)
    if single is not array and np.isinf(single).any() and not np.isinf(array[np.isinf(single)]).all():
        raise CollatorError(f"example {index}: {key} must fit into float32, found {np.abs(array).max()}.")
    return single


def concatenate(key: str, arrays: Sequence[Array]) -> Array:
    # The result is float32 if any column is. An integer that float32 would round is an error.
    whole = np.concatenate(arrays)
    if whole.dtype.kind != "f":
        return whole
    for index, array in enumerate(arrays):
        rounded = array[array != array.astype(np.float32).astype(array.dtype)]  # NaN is not itself, and is no integer
        if array.dtype.kind == "i" and len(rounded):
            raise CollatorError(
                f"example {index}: {key} holds the integer {rounded[0]}, other examples hold floats, and float32 "
                "would round it. Give all examples integers."
            )
    return whole.astype(np.float32, copy=False)


def require_same_keys(examples: Sequence[Mapping[str, Any]]) -> None:
    for key in sorted(set().union(*examples), key=str):
        without = [index for index, example in enumerate(examples) if key not in example]
        if without:
            raise CollatorError(
                f"{key} is in only some examples: example {without[0]} is without it ({len(without)} of "
                f"{len(examples)} are). Give it to all of them or to none."
            )


# --- lengths ---------------------------------------------------------------------------------------------------------


def document_lengths(position_ids: Array, lengths: Sequence[int]) -> list[int]:
    # A document ends with its example.
    found = boundaries(torch.from_numpy(position_ids)).lengths
    lengths_found: list[int] = np.diff(np.union1d(ends(found), ends(lengths)), prepend=0).tolist()
    return lengths_found


def ends(lengths: Sequence[int]) -> Array:
    return np.array([*accumulate(lengths)], dtype=np.int64)


def starts(lengths: Sequence[int]) -> Array:
    return np.array([0, *accumulate(lengths[:-1])], dtype=np.int64)


def restarting(lengths: Sequence[int], start: int) -> Array:
    longest = np.arange(start, start + max(lengths), dtype=np.int64)
    return np.concatenate([longest[:length] for length in lengths])
