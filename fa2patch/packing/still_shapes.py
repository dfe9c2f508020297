"""Shapes that stand still: rows of a few lengths, ends of documents in tensors of one size, one longest length.

torch.compile makes a graph anew, or a general one, for other shapes and numbers, and a CUDA graph is replayed for the
same ones only. The length of a packed row, its number of documents and ``max_length_q`` depend on its documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from ..documents.names import IGNORED_LABEL, LABELS, LOSS_LABELS
from ..errors import PackingError

# By the name of a rule: the number of lengths from one power of two to the next, without the first of them.
STEPS = {"power": 1, "eighth": 8}


def rounded_up(
    tokens: int,  # at least 1
    # The next multiple of this number; "power" for the next power of two; "eighth" for the next of the eight lengths
    # that divide the way between two powers of two evenly; None for no padding.
    to: int | str | None,
) -> int:
    # Padding is less than half of a row by "power", and less than an eighth by "eighth". The rows of a budget, most of
    # which are nearly full, then have one or two lengths, and rows of all sizes at most 8 for each doubling.
    if to is None:
        return tokens
    if isinstance(to, str):
        below = 1 << max((tokens - 1).bit_length() - 1, 0)  # the largest power of two that is smaller, or 1
        to = max(below // STEPS[to], 1)
    return tokens + -tokens % to


def stated_longest(longest: int, stated: int | str | None) -> int:
    """``max_length_*`` of a row by the option ``longest_document``."""
    # A number is stated as it is, also if a document is longer, which the caller refuses.
    return rounded_up(longest, stated) if stated is None or isinstance(stated, str) else stated


def ends_of(documents: Sequence[int], number: int | None) -> npt.NDArray[np.int32]:
    # The last end is repeated: documents without tokens follow, which no kernel computes.
    ends = np.array([0, *accumulate(documents)], dtype=np.int32)
    return ends if number is None else np.pad(ends, (0, number + 1 - len(ends)), mode="edge")


@dataclass(frozen=True)
class StillShapes:
    """Shapes of the passes of a budget that do not depend on their documents; see :func:`fa2patch.packing.passes`."""

    max_tokens: int  # no row is padded beyond it
    pad_to_multiple_of: int | str | None = None
    max_documents: int | None = None
    longest_document: int | str | None = None

    def __post_init__(self) -> None:
        to = self.pad_to_multiple_of
        _check("pad_to_multiple_of", to, words=True)
        _check("max_documents", self.max_documents, words=False)
        _check("longest_document", self.longest_document, words=True)
        if isinstance(to, int) and self.max_tokens % to:
            raise PackingError(
                f"pad_to_multiple_of={to}: expected a number that divides max_tokens, so that a full pass keeps the "
                f"budget, found max_tokens={self.max_tokens}. Take max_tokens={-(-self.max_tokens // to) * to}."
            )

    def __bool__(self) -> bool:
        return any(each is not None for each in (self.pad_to_multiple_of, self.max_documents, self.longest_document))

    def length(self, tokens: int) -> int:
        return max(min(rounded_up(tokens, self.pad_to_multiple_of), self.max_tokens), tokens)

    @property
    def _most(self) -> int:
        # The most tokens of a document of padding. A row's padding may be longer than any document.
        return self.longest_document if isinstance(self.longest_document, int) else max(self.max_tokens, 1)

    def documents(self, lengths: Sequence[int]) -> list[int]:
        # Behind the lengths of the row's documents are those of its padding.
        tokens = sum(lengths)
        whole, rest = divmod(self.length(tokens) - tokens, self._most)
        return [*lengths, *[self._most] * whole, *[rest] * (rest > 0)]

    def padded(self, name: str, value: torch.Tensor, dim: int) -> torch.Tensor:
        padding = self.length(value.shape[dim]) - value.shape[dim]
        if not padding:
            return value
        shape = [*value.shape[:dim], padding, *value.shape[dim + 1 :]]
        filled = value.new_full(shape, IGNORED_LABEL if name in (*LABELS, LOSS_LABELS) else 0)
        # Ids restart at the smallest one. The collator started there, and it never goes on from the row's last id.
        if name == "position_ids":  # its tokens are in the last dimension
            filled = filled + value.amin(dim, keepdim=True) + torch.arange(padding, device=value.device) % self._most
        return torch.cat([value, filled], dim)

    def ends(self, documents: Sequence[int]) -> npt.NDArray[np.int32]:
        # With ``max_documents`` there are as many in each row, and space for those of padding.
        if self.max_documents is None:
            return ends_of(documents, None)
        most = self.max_documents
        if self.pad_to_multiple_of is not None:
            most += -(-self.max_tokens // self._most)
        return ends_of(documents, max(most, len(documents)))  # a batch that cannot be cut has more

    def longest(self, documents: Sequence[int]) -> int:
        longest = max(documents)
        stated = stated_longest(longest, self.longest_document)
        if stated < longest:
            raise PackingError(
                f"longest_document={stated}, but a document of the batch has {longest} tokens. Raise it; max_tokens is "
                "always enough, unless too_long='alone'."
            )
        return stated


def _check(name: str, value: object, words: bool) -> None:
    number = isinstance(value, int) and not isinstance(value, bool) and value > 0
    if value is not None and not number and not (words and isinstance(value, str) and value in STEPS):
        rules = "'power', 'eighth' or None" if words else "or None"
        raise PackingError(f"{name}: expected a positive number{',' * words} {rules}, found {value!r}.")


PLAIN = StillShapes(0)  # rows without padding, whose shapes are those of their documents
