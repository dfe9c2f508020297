"""Which documents of a packed row are computed in one call of a module, as a batch that is padded on the right.

A call has a cost of its own, which the documents of a batch share. Padding has a cost, too. The rule weighs the two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..documents.boundaries import Boundaries
from .apart import Documents

A_CALL = 64
"""The padded tokens that a batch may hold in any case: about the cost of a call. On a CPU, a call of a mixer takes as
long as 50 to 300 tokens. Chunked mixers fill every document up to 64 tokens inside anyway."""

SHARE = 1 / 8
"""The padded tokens that a batch may hold besides, by its real tokens. A sequential scan costs by positions, so that
documents of near length cost as much together as the longest of them. Others pay for the padding."""

LARGEST = 16384
"""A batch holds at most so many tokens, unless a single document has more. More would not be faster, and a mixer in
pure torch needs memory for all that it computes in a call."""


def batches(lengths: Sequence[int], pads: bool) -> list[list[int]]:
    """Put documents into batches by their lengths alone, so that a recomputed forward makes the same ones.

    Documents are taken from the longest to the shortest, and a batch ends where the next one would need more padding
    than is allowed.

    Args:
        lengths: the documents' lengths in tokens.
        pads: whether a batch may be padded. If not, it holds documents of one length.

    Returns:
        The numbers of the documents in each batch, the longest first.
    """
    made: list[list[int]] = []
    longest = real = 0
    for at in sorted(range(len(lengths)), key=lambda at: -lengths[at]):
        tokens = real + lengths[at]
        padded = longest * (len(made[-1]) + 1) if made else 0
        allowed = A_CALL + SHARE * tokens if pads else 0
        if made and padded - tokens <= allowed and padded <= LARGEST:
            made[-1].append(at)
            real = tokens
        else:
            made.append([at])
            longest = real = lengths[at]
    return made


def documents(boundaries: Boundaries, shape: tuple[int, int], device: torch.device, pads: bool) -> Documents:
    """A batch's documents in the batches of :func:`batches`. They are made once in a forward, for all its layers."""
    key = (batches, shape, pads)
    if key not in boundaries.made:
        each = Documents(boundaries, shape)
        boundaries.made[key] = each.in_batches(batches(each.lengths, pads), device)
    made: Documents = boundaries.made[key]
    return made
