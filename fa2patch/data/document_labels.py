"""Labels of documents instead of tokens, for sequence classification."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import CollatorError
from .flattening import Array, Columns, as_numbers, concatenate, given, require_same_keys

TARGETS = ("labels", "label", "label_ids")
"""Column names under which datasets store one label per document."""


def without_targets(features: Iterable[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[Columns]]:
    """Split examples into their columns and their document labels, ``{"labels": ...}`` or ``{}``."""
    rest, targets = [], []
    for index, feature in enumerate(features):
        found = given(index, feature)
        named = [name for name in TARGETS if name in found]
        if len(named) > 1:
            raise CollatorError(f"example {index}: labels under more than one name: {', '.join(named)}. Keep one.")
        values = [as_numbers(index, name, found.pop(name), "one label per document") for name in named]
        rest.append(found)
        targets.append({"labels": values[0]} if values else {})
    return rest, targets


def one_per_document(targets: Sequence[Columns], documents: Sequence[int]) -> Array | None:
    """Return labels ``[documents]`` or ``[documents, numbers]``, or None if no example has any.

    Args:
        targets: The labels of each example, as ``without_targets`` returns them.
        documents: The number of each example's documents. The padding may follow; it has no labels.
    """
    if not any(targets):
        return None
    require_same_keys(targets)
    arrays = [np.atleast_1d(target["labels"]) for target in targets]
    if any(len(array) != count for array, count in zip(arrays, documents)):
        # If an example has one document, its list of numbers holds several targets of that document.
        single = [array[None] if count == 1 else array for array, count in zip(arrays, documents)]
        for index, (array, count) in enumerate(zip(single, documents)):
            if len(array) != count or array.ndim != 2 or array.shape[1:] != single[0].shape[1:]:
                raise CollatorError(
                    f"example {index}: labels of shape {targets[index]['labels'].shape} for {count} documents. "
                    "Expected one number for each document, or in all examples equally many numbers for each."
                )
        arrays = single
    joined = concatenate("labels", [array if array.dtype.kind == "f" else array.astype(np.int64) for array in arrays])
    return joined.astype(np.float32 if joined.ndim == 2 else joined.dtype, copy=False)
