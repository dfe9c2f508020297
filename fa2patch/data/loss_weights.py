"""Labels and weights with which every document has the same weight in the loss."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..documents.names import COUNTED_LABEL, IGNORED_LABEL, LOSS_LABELS, LOSS_WEIGHTS
from ..errors import CollatorError
from .flattening import Array, Columns, starts

DOCUMENT = "document"


def check(name: str | None) -> None:
    """Raise :class:`CollatorError` if the option ``loss_weights`` is neither ``"document"`` nor None."""
    if name not in (None, DOCUMENT):
        raise CollatorError(f"loss_weights: expected 'document' or None, found {name!r}.")


def by_document(labels: Array, lengths: Sequence[int]) -> Columns:
    """Return ``labels`` that count documents, ``loss_labels`` and ``loss_weights``, each ``[tokens]``.

    A patched model computes the loss from the other two. Trainer divides it by the number of ``labels`` in a step:
    there is one for each document that has any label, at its first token in the loss.

    Args:
        labels: int64 ``[tokens]``, -100 outside the loss. The first label of each document does not count.
        lengths: The lengths of the documents, in tokens.
    """
    first = starts(lengths)
    learned = labels != IGNORED_LABEL
    learned[first] = False
    counts = np.add.reduceat(learned, first, dtype=np.int64)
    (at,) = np.nonzero(learned)
    counted = np.full_like(labels, IGNORED_LABEL)
    counted[at[(counts.cumsum() - counts)[counts > 0]]] = COUNTED_LABEL
    weights = np.zeros(len(labels), dtype=np.float32)
    weights[at] = np.repeat(1 / np.maximum(counts, 1), counts)
    return {"labels": counted, LOSS_LABELS: np.where(learned, labels, IGNORED_LABEL), LOSS_WEIGHTS: weights}
