"""Weights in the loss of a batch: of documents, which weigh the same, or of tokens, which a column says.

A trainer divides the loss of a step by the number of ``labels``. So they become a count of what the loss is divided by,
and the tokens to predict and their weights are columns of their own, from which a patched model computes the loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..documents.names import COUNTED_LABEL, IGNORED_LABEL, LOSS_LABELS, LOSS_WEIGHTS
from ..errors import CollatorError
from .columns import Array, Columns, Flat, starts

DOCUMENT, TOKEN = "document", "token"


def check_option(loss_weights: object) -> None:
    if loss_weights not in (None, DOCUMENT, TOKEN):
        raise CollatorError(f"loss_weights: expected 'document', 'token' or None, found {loss_weights!r}.")


def check_columns(flat: Flat, loss_weights: str | None) -> None:
    # A column `loss_weights` of a batch without weighted loss is a column like any other one.
    if loss_weights is None:
        return
    for key in (LOSS_LABELS, LOSS_WEIGHTS):
        if key in flat.columns and (key, loss_weights) != (LOSS_WEIGHTS, TOKEN):
            raise CollatorError(f"{key} is made by the collator. Remove it from the examples.")
    if loss_weights != TOKEN:
        return
    weights = flat.columns.get(LOSS_WEIGHTS)
    if weights is None:
        raise CollatorError(
            f'{LOSS_WEIGHTS} missing: loss_weights="token" takes the weight of each token from this column, found '
            f"{', '.join(flat.columns)}. Add it to the examples, one number for each token. Trainer drops it unless "
            "remove_unused_columns=False."
        )
    (wrong,) = np.nonzero(~np.isfinite(weights))
    if len(wrong):
        raise CollatorError(
            f"example {flat.number_of(wrong[0])}: {LOSS_WEIGHTS} holds {weights[wrong[0]]}. Expected finite numbers."
        )


def weighted(columns: Columns, lengths: Sequence[int], loss_weights: str) -> Columns:
    # By document, there is one of `labels` for each document that has any label, at its first token in the loss. By
    # token, there is one for each token in the loss, as ms-swift counts them: a token of weight 0 is not in the loss.
    labels, first = columns["labels"], starts(lengths)
    learned = labels != IGNORED_LABEL
    learned[first] = False
    if loss_weights == TOKEN:
        given = columns[LOSS_WEIGHTS].astype(np.float32)
        learned &= given != 0
        weights, counted = np.where(learned, given, np.float32(0)), learned
    else:
        weights, counted = _of_documents(learned, first)
    return {
        "labels": np.where(counted, np.int64(COUNTED_LABEL), IGNORED_LABEL),
        LOSS_LABELS: np.where(learned, labels, IGNORED_LABEL),
        LOSS_WEIGHTS: weights,
    }


def _of_documents(learned: Array, first: Array) -> tuple[Array, Array]:
    # The weights add up to 1 in each document. The second result marks the first learned token of each.
    counts = np.add.reduceat(learned, first, dtype=np.int64)
    (at,) = np.nonzero(learned)
    counted = np.zeros(len(learned), dtype=bool)
    counted[at[(counts.cumsum() - counts)[counts > 0]]] = True
    weights = np.zeros(len(learned), dtype=np.float32)
    weights[at] = np.repeat(1 / np.maximum(counts, 1), counts)
    return weights, counted
