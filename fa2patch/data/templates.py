"""Where a template is among the token ids of a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable

import numpy as np

from .flattening import Array

Span = tuple[int, int]
"""The first token of a template, and the token behind its last one."""


def of_ids(ids: Array, template: Sequence[int]) -> list[Span]:
    """Return the spans of a template's token ids in ``ids``, int64 ``[tokens]``, in order."""
    length = len(template)
    windows = np.lib.stride_tricks.sliding_window_view(ids, length) if len(ids) >= length else ids[:0, None]
    return [(int(at), int(at) + length) for at in np.flatnonzero((windows == template).all(axis=1))]


def of_text(
    ids: Array, template: str, token_ids: Sequence[int], text: str, decode: Callable[[Array], str]
) -> list[Span]:
    """Return the spans of a template given as text, in order.

    A tokenizer may split a template into different tokens in another context. If the text holds the template more often
    than the ids hold ``token_ids``, it is searched for in the text. A token that overlaps it belongs to it.

    Args:
        ids: int64 ``[tokens]``.
        template: The text to search for.
        token_ids: The template as token ids.
        text: The decoded ``ids``.
        decode: Returns the text of token ids.
    """
    spans = of_ids(ids, token_ids)
    if text.count(template) <= len(spans):
        return spans
    spans, at = [], text.find(template)
    while at >= 0:
        end = at + len(template)
        spans.append((_up_to(ids, at, False, decode), _up_to(ids, end, True, decode)))
        at = text.find(template, end)
    return spans


def _up_to(ids: Array, characters: int, inside: bool, decode: Callable[[Array], str]) -> int:
    """Count the tokens of the first ``characters``; ``inside`` counts a token that crosses the end of them too."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high + (not inside)) // 2
        made = len(decode(ids[:middle]))
        if inside:
            low, high = (low, middle) if made >= characters else (middle + 1, high)
        else:
            low, high = (middle, high) if made <= characters else (low, middle - 1)
    return low
