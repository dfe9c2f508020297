"""Padded batches of examples."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np

from ..errors import CollatorError
from .flattening import Array, Columns

_FIRST = ("input_ids", "attention_mask", "labels")


def padded(columns: Sequence[Columns], fill: Mapping[str, int | None], multiple: int, left: bool) -> Columns:
    """Return the examples' columns, padded to the longest example, each ``[examples, longest]``.

    Args:
        columns: The columns of each example, ``[tokens]``. All have the same keys.
        fill: The padding's value for a column, 0 for columns that are not in it. ``input_ids`` may be None if all
            examples have the same length.
        multiple: Rows are padded to a multiple of this many tokens.
        left: Pad on the left.

    Raises:
        CollatorError: There are no examples, or padding is needed and ``input_ids`` of ``fill`` is None.
    """
    if not columns:
        raise CollatorError("expected at least one example, found an empty batch.")
    lengths = [len(one["input_ids"]) for one in columns]
    width = -(-max(lengths) // multiple) * multiple
    if fill["input_ids"] is None and min(lengths) < width:
        raise CollatorError("padding_free=False needs a tokenizer with a pad_token_id. Set tokenizer.pad_token.")

    def filled(key: str, values: Array) -> Array:
        missing = width - len(values)
        return np.pad(values, (missing, 0) if left else (0, missing), constant_values=fill.get(key) or 0)

    keys = sorted(columns[0], key=lambda key: _FIRST.index(key) if key in _FIRST else len(_FIRST))
    return {key: np.stack([filled(key, one[key]) for one in columns]) for key in keys}


def as_encoding(batch: dict[str, Any]) -> MutableMapping[str, Any]:
    """Return the batch as a ``BatchEncoding``, which has ``to(device)``; as it is if there is no Transformers.

    A batch with lengths holds integers, which ``to`` rejects up to Transformers 4.42. It stays a dict.
    """
    if any(isinstance(value, int) for value in batch.values()):
        return batch
    try:
        from transformers import BatchEncoding
    except ImportError:
        return batch
    encoding: MutableMapping[str, Any] = BatchEncoding(batch)
    return encoding
