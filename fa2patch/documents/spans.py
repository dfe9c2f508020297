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
    """The spans of a batch, on the host, and the queries and keys of a second call of a kernel.

    Attributes:
        tokens: int64 ``[queries]``, the tokens of all spans.
        keys: int64 ``[keys]``, for each span the tokens of its document up to the span's last token, end to end.
        counts, key_counts: each span's number of queries and of keys.
    """

    tokens: NDArray[np.int64]
    keys: NDArray[np.int64]
    counts: tuple[int, ...]
    key_counts: tuple[int, ...]

    @property
    def longest(self) -> int:
        """The length of the longest span, in tokens; 0 if there are none."""
        return max(self.counts, default=0)


def last_seen(
    blocks: torch.Tensor, cu_seqlens: torch.Tensor, shape: tuple[int, int], real: torch.Tensor | None, prefixes: bool
) -> torch.Tensor:
    """For each token the last token that it sees, from the numbers of blocks. Nothing is read from a device.

    Two tokens that stand side by side in one document, with the same number of 0 or more, are in one span. Padding is
    in no span.

    Args:
        blocks: integers ``[batch or 1, length]``; negative for tokens in no block.
        cu_seqlens: the boundaries of the documents, int32 ``[documents + 1]``.
        real: ``[batch, length]``, 0 for padding; None if there is none.
        prefixes: whether all tokens of a document see a block, so that it must begin the document.

    Returns:
        int32 ``[tokens]``, indices in the rows laid end to end.

    Raises:
        PackingNotIsolated: the blocks of a document are no spans.
    """
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
    """The spans that :func:`last_seen` found in documents with these boundaries."""
    token = np.arange(len(until))
    starts = token[(until > token) & np.concatenate([[True], until[1:] != until[:-1]])]
    ends = until[starts] + 1
    documents = cu_seqlens[np.searchsorted(cu_seqlens, starts, side="right") - 1]
    counts, key_counts = (tuple((ends - begins).tolist()) for begins in (starts, documents))
    return Spans(_ranges(starts, ends), _ranges(documents, ends), counts, key_counts)


def _ranges(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(start, end) for start, end in zip(starts, ends))])
