"""Examples -> one packed row, in pure torch and numpy: the same collator for every Transformers version."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .boundaries import boundaries
from .errors import CollatorError

_Array = npt.NDArray[Any]
_Columns = dict[str, _Array]

_IDS = ("input_ids", "labels", "position_ids")
_MADE_HERE = ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_IGNORED_LABEL = -100
_TENSOR: dict[str, Callable[[_Array], Any]] = {"pt": torch.tensor, "np": np.array}


@dataclass
class DataCollatorWithFlattening:
    """Concatenate the examples of a mini-batch into one row without padding.

    Takes the options of the class of this name in Transformers 5.23 and returns the same batch. Pass options
    by keyword; as upstream, only ``return_tensors`` may be positional.

    Args:
        return_tensors: ``"pt"`` or ``"np"``.
        return_position_ids: return ``position_ids``, which restart in every document.
        separator_id: replaces the first label of every document.
        return_flash_attn_kwargs: return ``cu_seq_lens_q`` and ``_k``, ``max_length_q`` and ``_k``.
        return_seq_idx: return ``seq_idx``, the number of every token's document.
        position_ids_start: position id of every document's first token (2 for RoBERTa and its kin).
        pad_to_multiple_of: pad the row to a multiple of this many tokens. The padding is a document of its
            own: boundaries, ``seq_idx`` and ``max_length_*`` count it. Its labels are -100, its position ids
            count up from ``position_ids_start``, and what else the examples hold is 0 there.
        pad_token_id: the padding's ``input_ids``.

    Raises:
        CollatorError: ``pad_to_multiple_of`` below 1, or another option that must be an integer and is none.
    """

    return_tensors: str = "pt"
    return_position_ids: bool = True
    separator_id: int = -100
    return_flash_attn_kwargs: bool = False
    return_seq_idx: bool = False
    position_ids_start: int = 0
    pad_to_multiple_of: int | None = None
    pad_token_id: int = 0

    def __post_init__(self) -> None:
        multiple = self.pad_to_multiple_of
        for name in ("separator_id", "position_ids_start", *(["pad_token_id"] if multiple is not None else [])):
            _integer(name, getattr(self, name))
        if multiple is not None and _integer("pad_to_multiple_of", multiple) < 1:
            raise CollatorError(f"pad_to_multiple_of: expected a positive number or None, found {multiple}.")

    def __call__(
        self,
        features: Iterable[Mapping[str, Any]],
        return_tensors: str | None = None,
        separator_id: int | None = None,
    ) -> dict[str, Any]:
        """One packed row of T tokens.

        Args:
            features: examples, each a mapping of lists, arrays or tensors with one number per token. A value
                of None counts as absent.

                - ``input_ids``: required.
                - ``labels``: default ``input_ids``. The first of every document becomes ``separator_id``.
                - ``position_ids``: kept as they are; ``position_ids_start`` does not apply to them. Where one
                  is not its left neighbour's plus one, another document starts inside the example.
                - ``attention_mask``: not returned. Tokens that it hides (0) are a tokenizer's padding: they
                  are dropped from the example, from all of its keys.
                - any other key (``completion_mask``, ``token_type_ids``, weights, ...): concatenated.
            return_tensors: instead of the option of this name, for this call.
            separator_id: likewise.

        Returns:
            ``input_ids``, ``labels``, ``position_ids``: int64 ``[1, T]``. ``seq_idx``: int32 ``[1, T]``.
            ``cu_seq_lens_q`` and ``_k``: int32 ``[documents + 1]``, equal. ``max_length_q`` and ``_k``: int.
            Further keys: ``[1, T]``, int64 (integers and booleans) or float32.

        Raises:
            CollatorError: no examples, or an empty one; ``input_ids`` missing; a key that only some examples
                hold, or that is not one number per token (such as a class label); position ids that hide
                where an example starts while neither ``cu_seq_lens`` nor ``seq_idx`` is returned; an unknown
                ``return_tensors``; a ``separator_id`` that is no integer.
        """
        framework = self.return_tensors if return_tensors is None else return_tensors
        if not isinstance(framework, str) or framework not in _TENSOR:
            raise CollatorError(f"return_tensors: expected 'pt' or 'np', found {framework!r}.")
        separator = self.separator_id if separator_id is None else _integer("separator_id", separator_id)
        if not isinstance(features, Iterable):
            raise CollatorError(f"expected a list of examples, found {type(features).__name__}.")
        examples = [_read(index, feature) for index, feature in enumerate(features)]
        if not examples:
            raise CollatorError("expected at least one example, found an empty batch.")
        _require_same_keys(examples)
        examples = [self._complete(example) for example in examples]
        tokens = sum(len(example["input_ids"]) for example in examples)
        examples += self._padding(tokens, examples[0])
        if not (self.return_flash_attn_kwargs or self.return_seq_idx):
            _require_visible_starts(examples)

        row = {key: _concatenate([example[key] for example in examples]) for key in examples[0]}
        lengths = [length for example in examples for length in _document_lengths(example)]
        cu_seq_lens = np.cumsum([0, *lengths])
        row["labels"][cu_seq_lens[:-1]] = separator
        row["labels"][tokens:] = _IGNORED_LABEL
        return self._batch(row, cu_seq_lens, _TENSOR[framework])

    def _complete(self, example: _Columns) -> _Columns:
        ids = example["input_ids"]
        return {"input_ids": ids, "labels": ids, "position_ids": self._positions(len(ids)), **example}

    def _positions(self, length: int) -> _Array:
        return np.arange(self.position_ids_start, self.position_ids_start + length, dtype=np.int64)

    def _padding(self, tokens: int, like: _Columns) -> list[_Columns]:
        """The padding as an example with the keys of ``like``, or nothing where none is needed."""
        length = -tokens % self.pad_to_multiple_of if self.pad_to_multiple_of else 0
        if not length:
            return []
        padding: _Columns = {key: np.zeros(length, dtype=values.dtype) for key, values in like.items()}
        padding["input_ids"] = np.full(length, self.pad_token_id, dtype=np.int64)
        padding["position_ids"] = self._positions(length)
        return [padding]

    def _batch(self, row: _Columns, cu_seq_lens: _Array, tensor: Callable[[_Array], Any]) -> dict[str, Any]:
        lengths = np.diff(cu_seq_lens)
        arrays = {key: row[key][None] for key in _IDS if key != "position_ids" or self.return_position_ids}
        if self.return_seq_idx:
            arrays["seq_idx"] = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[None]
        if self.return_flash_attn_kwargs:
            arrays["cu_seq_lens_q"] = arrays["cu_seq_lens_k"] = cu_seq_lens.astype(np.int32)
        arrays.update({key: values[None] for key, values in row.items() if key not in _IDS})
        batch = {key: tensor(values) for key, values in arrays.items()}
        if self.return_flash_attn_kwargs:
            batch["max_length_q"] = batch["max_length_k"] = int(lengths.max())
        return batch


def _integer(name: str, value: Any) -> int:
    """An option that must be an integer, far enough from where int64 ends to be counted on from."""
    try:
        number = operator.index(value)
    except TypeError:
        raise CollatorError(f"{name}: expected an integer, found {value!r}.") from None
    if abs(number) >= 2**62:
        raise CollatorError(f"{name}: expected an integer of at most 62 bits, found {number}.")
    return number


def _read(index: int, feature: Mapping[str, Any]) -> _Columns:
    """The example's columns without masked tokens: int64 or float32, one number per token."""
    if not isinstance(feature, Mapping):
        raise CollatorError(f"example {index}: expected a mapping, found {type(feature).__name__}.")
    given = {key: value for key, value in feature.items() if value is not None}
    if "input_ids" not in given:
        raise CollatorError(f"example {index}: input_ids missing, found {', '.join(map(str, given)) or 'no keys'}.")
    for key in _MADE_HERE:
        if key in given:
            raise CollatorError(f"example {index}: {key} is made by the collator. Remove it from the examples.")
    columns = {key: _as_array(index, key, value) for key, value in given.items()}
    length = len(columns["input_ids"])
    for key, values in columns.items():
        if len(values) != length:
            raise CollatorError(
                f"example {index}: {key} has length {len(values)}, but input_ids has length {length}. "
                "Every key needs one number per token."
            )
    for key in _IDS:
        if length and key in columns and columns[key].dtype != np.int64:
            raise CollatorError(f"example {index}: {key} must be integers, found floats.")
    return _drop_masked(index, columns)


def _as_array(index: int, key: str, value: Any) -> _Array:
    """A new int64 or float32 array ``[length]``."""
    if isinstance(value, torch.Tensor):
        if value.device.type == "meta" or value.layout != torch.strided or value.is_nested:
            kind = "on the meta device" if value.device.type == "meta" else f"of layout {value.layout}"
            raise CollatorError(f"example {index}: {key} must be one number per token, found a tensor {kind}.")
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value).numpy()
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise CollatorError(f"example {index}: {key} is not one number per token ({error}).") from error
    if array.dtype.kind not in "biuf":
        raise CollatorError(
            f"example {index}: {key} holds no plain numbers ({type(value).__name__} of {array.dtype}). "
            "Remove what is not one number per token from the examples."
        )
    if array.dtype.kind == "b" and key in _IDS:
        raise CollatorError(f"example {index}: {key} must be integers, found booleans.")
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise CollatorError(f"example {index}: {key} must fit into int64, found {array.max()}.")
    if array.ndim == 0 and key == "labels":
        raise CollatorError(
            f"example {index}: labels is the single number {array}. A packed row needs token-level labels, "
            "one per token of input_ids."
        )
    if array.ndim != 1:
        raise CollatorError(f"example {index}: {key} must be one number per token, found shape {array.shape}.")
    return array.astype(np.float32 if array.dtype.kind == "f" else np.int64)


def _drop_masked(index: int, columns: _Columns) -> _Columns:
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


def _require_same_keys(examples: Sequence[_Columns]) -> None:
    for key in sorted(set().union(*examples), key=str):
        without = [index for index, example in enumerate(examples) if key not in example]
        if without:
            raise CollatorError(
                f"{key} is in only some examples: example {without[0]} is without it ({len(without)} of "
                f"{len(examples)} are). Give it to all of them or to none."
            )


def _require_visible_starts(examples: Sequence[_Columns]) -> None:
    positions = [example["position_ids"] for example in examples]
    for index, (left, right) in enumerate(zip(positions, positions[1:]), start=1):
        if int(right[0]) == int(left[-1]) + 1:
            raise CollatorError(
                f"position_ids go on from {left[-1]} to {right[0]} where example {index} (or the padding) "
                "starts, which hides that start. Let them restart, or set return_flash_attn_kwargs=True."
            )


def _document_lengths(example: _Columns) -> tuple[int, ...]:
    return boundaries(torch.tensor(example["position_ids"])).lengths


def _concatenate(arrays: Sequence[_Array]) -> _Array:
    joined = np.concatenate(arrays)
    return joined.astype(np.float32) if joined.dtype.kind == "f" else joined
