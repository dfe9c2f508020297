"""Where the rows of a padded batch start and end, and what they have in common, in one read from the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..documents import device
from .common_prefixes import common_prefixes


class Rows(NamedTuple):
    """The rows of a padded batch, on the host.

    Attributes:
        starts: the column of each row's first real token.
        lengths: each row's number of real tokens, at least 1.
        full: whether there is no padding.
        said: what else was asked of the batch.
        common: in how many first columns two rows are equal, from their first real tokens on; None if they were not
            compared.
    """

    starts: NDArray[Any]
    lengths: NDArray[Any]
    full: bool
    said: tuple[bool, ...]
    common: NDArray[Any] | None


def read_rows(
    mask: torch.Tensor,
    position_ids: torch.Tensor | None,
    compared: Sequence[torch.Tensor],
    asked: Sequence[torch.Tensor] = (),
) -> Rows | None:
    """Read the rows of a padded batch, or return None for a batch that is not padded with a mask of zeros and ones.

    Args:
        mask: ``[batch, length]``.
        position_ids: ``[batch, length]``, or None. They must go on by one inside a row's real tokens.
        compared: integers ``[batch, length]`` each, in which rows are compared; empty to compare none.
        asked: bool tensors without dimensions that are read together with the rows.
    """
    rows, length = mask.shape
    real = mask != 0
    starts, lengths = real.to(torch.uint8).argmax(1), real.sum(1)
    column = torch.arange(length, device=mask.device)
    inside = (column >= starts[:, None]) & (column < (starts + lengths)[:, None])
    plain = (real == inside).all() & ((mask == 1) == real).all() & (lengths > 0).all()
    if position_ids is not None:
        ids = position_ids.to(mask.device)
        plain &= ((ids[:, 1:] == ids[:, :-1] + 1) | ~(real[:, 1:] & real[:, :-1])).all()
    parts = [starts, lengths, plain[None], *(each.to(mask.device)[None] for each in asked)]
    if compared:
        aligned = (column + starts[:, None]) % length
        parts.append(common_prefixes([value.to(mask.device).gather(1, aligned) for value in compared]).flatten())
    read = device.read(torch.cat([part.to(torch.int32) for part in parts]))
    behind = 2 * rows + 1
    of_starts, of_lengths, holds, said, common = np.split(read, [rows, 2 * rows, behind, behind + len(asked)])
    if not holds[0]:
        return None
    full = bool((of_lengths == length).all())
    answers = tuple(map(bool, said))
    return Rows(of_starts, of_lengths, full, answers, common.reshape(rows, rows) if compared else None)
