"""The shape of a packed row: its length, its number of documents, and the longest document that it states.

torch.compile makes a graph anew, or a general one, for other shapes and numbers, and a CUDA graph is replayed for the
same ones only. All three depend on a row's documents, and each can be the same in every row, or one of a few.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..errors import Fa2PatchError, PackingError
from .names import IGNORED_LABEL, LABELS, LOSS_LABELS

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


@dataclass(frozen=True)
class RowShape:
    """Raises ``error`` for options that are invalid, and for documents that do not fit."""

    pad_to_multiple_of: int | str | None = None
    max_documents: int | None = None
    longest_document: int | str | None = None
    max_tokens: int | None = None  # a budget, beyond which no row is padded
    error: type[Fa2PatchError] = PackingError

    def __post_init__(self) -> None:
        to, most = self.pad_to_multiple_of, self.max_tokens
        self._check("pad_to_multiple_of", to, (*STEPS,))
        self._check("max_documents", self.max_documents, ())
        self._check("longest_document", self.longest_document, (*STEPS,))
        if most is not None and to is not None and not isinstance(to, str) and most % to:
            raise self.error(
                f"pad_to_multiple_of={to}: expected a number that divides max_tokens, so that a full pass keeps the "
                f"budget, found max_tokens={most}. Take max_tokens={-(-most // to) * to}."
            )

    def _check(self, name: str, value: Any, rules: Sequence[str]) -> None:
        if value is None or (isinstance(value, str) and value in rules):
            return
        try:
            number = 0 if isinstance(value, bool) else operator.index(value)
        except TypeError:
            number = 0
        if not 1 <= number < 2**62:  # positions that count up from it must fit int64
            others = f", {', '.join(map(repr, rules))}" if rules else ""
            raise self.error(f"{name}: expected a positive number{others} or None, found {value!r}.")

    def __bool__(self) -> bool:
        return any(each is not None for each in (self.pad_to_multiple_of, self.max_documents, self.longest_document))

    def length(self, tokens: int) -> int:
        padded = rounded_up(tokens, self.pad_to_multiple_of)
        return padded if self.max_tokens is None else max(min(padded, self.max_tokens), tokens)

    @property
    def _longest_padding(self) -> int | None:
        # The padding of a budget's row may be longer than any document, so it is several documents.
        if self.max_tokens is None:
            return None
        stated = self.longest_document
        return self.max_tokens if stated is None or isinstance(stated, str) else stated

    def documents(self, lengths: Sequence[int]) -> list[int]:
        """Return the lengths of a row's documents, and behind them those of its padding."""
        tokens = sum(lengths)
        padding = self.length(tokens) - tokens
        longest = self._longest_padding or max(padding, 1)
        whole, rest = divmod(padding, longest)
        return [*lengths, *[longest] * whole, *[rest] * (rest > 0)]

    def padded(self, name: str, value: torch.Tensor, dim: int) -> torch.Tensor:
        """Return a value of a row with its padding along ``dim``: zeros, ignored labels, ids that restart."""
        padding = self.length(value.shape[dim]) - value.shape[dim]
        if not padding:
            return value
        shape = [*value.shape[:dim], padding, *value.shape[dim + 1 :]]
        filled = value.new_full(shape, IGNORED_LABEL if name in (*LABELS, LOSS_LABELS) else 0)
        if name == "position_ids":  # its tokens are in the last dimension
            # The smallest id is where the collator started, and never goes on from the row's last one.
            counted = torch.arange(padding, device=value.device) % (self._longest_padding or padding)
            filled = filled + value.amin(dim, keepdim=True) + counted
        return torch.cat([value, filled], dim)

    def ends(self, documents: Sequence[int]) -> npt.NDArray[np.int32]:
        """Return 0 and the end of every document, int32, with ``max_documents`` as many entries in each row."""
        found = np.array([0, *accumulate(documents)], dtype=np.int32)
        if self.max_documents is None:
            return found
        most = self.max_documents
        if self.pad_to_multiple_of is not None:  # the padding is documents, too: one without a budget
            most += -(-(self.max_tokens or 1) // (self._longest_padding or 1))
        # The last end is repeated: documents without tokens follow, which no kernel computes. A batch that cannot be
        # cut has more documents.
        return np.pad(found, (0, max(most - len(documents), 0)), mode="edge")

    def longest(self, documents: Sequence[int]) -> int:
        """Return the ``max_length_*`` that a row states."""
        longest, stated = max(documents), self.longest_document
        if stated is None or isinstance(stated, str):
            return rounded_up(longest, stated)
        if stated < longest:
            raise self.error(
                f"longest_document={stated}, but a document of the row, or its padding, has {longest} tokens. Raise "
                "it; the length of a whole row is always enough."
            )
        return stated


PLAIN = RowShape()  # without padding: the shape is that of the documents
