"""Spans: runs of tokens of one document that see each other in both directions, such as the tokens of a picture.

A token of a span sees its document up to the span's last token. All other tokens see their document up to themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from ..errors import PackingNotIsolated
from .tensors import require

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Spans(NamedTuple):
    """The spans of a batch, on the host, and the queries and keys of a second call of a kernel."""

    tokens: NDArray[np.int64]  # [queries]: the tokens of all spans
    # [keys]: for each span the tokens of its document up to the span's last token, end to end
    keys: NDArray[np.int64]
    counts: tuple[int, ...]  # each span's number of queries
    key_counts: tuple[int, ...]

    @property
    def longest(self) -> int:
        return max(self.counts, default=0)


def last_seen(
    blocks: torch.Tensor,  # numbers [batch or 1, length]; negative for tokens in no block
    cu_seqlens: torch.Tensor,
    shape: tuple[int, int],
    real: torch.Tensor | None,  # [batch, length]: 0 for padding
    prefixes: bool,  # all tokens of a document see a block, so that it must begin the document
) -> torch.Tensor:
    """For each token the last token that it sees, int32 ``[tokens]``, as indices in the rows laid end to end."""
    # Nothing is read from a device. Neighbours in one document with the same number, 0 or more, are in one span.
    # Padding is in no span.
    cu = cu_seqlens.long()
    numbers = blocks.to(cu.device, torch.int64).expand(shape).flatten()
    if real is not None:
        numbers = torch.where(real.to(cu.device).flatten() != 0, numbers, -1)
    token = torch.arange(numbers.shape[0], device=cu.device)
    document = torch.searchsorted(cu, token, right=True) - 1
    inside, before = numbers >= 0, (token - 1).clamp(min=0)
    starts = (token == 0) | (document != document[before])
    first = starts | (numbers != numbers[before])
    block = torch.where(inside, (document << 32) + numbers, -1 - token)  # a number for each block and each other token
    require(
        (block.sort().values.diff() != 0).sum() + 1 - (block < 0).sum() == (first & inside).sum(),
        PackingNotIsolated,
        "tokens that see each other in both directions (a picture, or a prefix) are in two pieces of one document, and "
        "others are between them, which packed attention has no way to say. Let them stand side by side, or train "
        "padded.",
    )
    if prefixes:
        require(
            ~(first & inside & ~starts).any(),
            PackingNotIsolated,
            "the prefix of a document, which all of its tokens see, does not begin the document. Let token_type_ids be "
            "0 for a prefix and 1 for all tokens behind it, or train padded.",
        )
    run = first.long().cumsum(0)
    last = torch.searchsorted(run, run, right=True) - 1
    return torch.where(inside, last, token).to(torch.int32)


def on_the_host(until: NDArray[np.int32], cu_seqlens: NDArray[np.int32]) -> Spans:
    # ``until`` is what last_seen has found.
    token = np.arange(len(until))
    starts = token[(until > token) & np.concatenate([[True], until[1:] != until[:-1]])]
    ends = until[starts] + 1
    documents = cu_seqlens[np.searchsorted(cu_seqlens, starts, side="right") - 1]
    counts, key_counts = (tuple((ends - begins).tolist()) for begins in (starts, documents))
    return Spans(_ranges(starts, ends), _ranges(documents, ends), counts, key_counts)


def _ranges(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(start, end) for start, end in zip(starts, ends))])
