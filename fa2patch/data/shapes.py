"""Shapes that stand still: rows of a few lengths, ends of documents in tensors of one size, one longest length.

torch.compile makes a graph anew, or a general one, for other shapes and other numbers, and a CUDA graph is replayed for
the same ones only. A packed row has three that depend on its documents: its length, how many documents it has, and
``max_length_q``. Each of them can be the same in every row, or one of a few.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from ..errors import CollatorError
from .columns import Array, integer

STEPS = {"power": 1, "eighth": 8}
"""The number of lengths from one power of two to the next, without the first of them, by the name of a rule."""


def check_rounding(name: str, value: int | str | None) -> None:
    """Raise :class:`CollatorError` unless an option is None, a positive integer or the name of a rule."""
    if value is None or (isinstance(value, str) and value in STEPS):
        return
    if isinstance(value, str) or integer(name, value) < 1:
        raise CollatorError(f"{name}: expected a positive number, 'power', 'eighth' or None, found {value!r}.")


def rounded_up(tokens: int, to: int | str | None) -> int:
    """Return the length to which so many tokens are padded.

    Padding is less than half of a row by ``"power"``, and less than an eighth by ``"eighth"``. The rows of a budget,
    most of which are nearly full, then have one or two lengths, and rows of all sizes at most 8 for each doubling.

    Args:
        tokens: The number of tokens, at least 1.
        to: The next multiple of this number; ``"power"`` for the next power of two; ``"eighth"`` for the next of the
            eight lengths that divide the way between two powers of two evenly; None for no padding.
    """
    if to is None:
        return tokens
    if isinstance(to, str):
        below = 1 << max((tokens - 1).bit_length() - 1, 0)  # the largest power of two that is smaller, or 1
        to = max(below // STEPS[to], 1)
    return tokens + -tokens % to


def ends_of(documents: Sequence[int], number: int | None) -> Array:
    """Return 0 and the end of every document, int32 ``[documents + 1]``, or with a ``number`` int32 ``[number + 1]``.

    The last end is repeated: documents without tokens follow, which no kernel computes.
    """
    ends = np.array([0, *accumulate(documents)], dtype=np.int32)
    return ends if number is None else np.pad(ends, (0, number + 1 - len(ends)), mode="edge")


def require_few(documents: int, most: int | None) -> None:
    """Raise :class:`CollatorError` if a row has more documents than ``max_documents``."""
    if most is not None and documents > most:
        raise CollatorError(
            f"max_documents={most}, but a row has {documents} documents. Raise max_documents to the most that a row "
            "may hold (of a packing.plan: max(map(len, plan))), or put fewer into a row."
        )


def stated_longest(longest: int, stated: int | str | None) -> int:
    """Return ``max_length_q`` of a row from its longest document and the option ``longest_document``.

    Raises:
        CollatorError: The row has a longer document than stated.
    """
    if stated is None or isinstance(stated, str):
        return rounded_up(longest, stated)
    if longest > stated:
        raise CollatorError(
            f"longest_document={stated}, but a document of the row, or its padding, has {longest} tokens. Raise "
            "longest_document; the length of a whole row is always enough."
        )
    return stated
