"""The grammar of position ids: which tokens start a document, on one axis and on three (mRoPE).

Arrays are ``[batch, length]``; with axes, ``[axes, batch, length]``.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]
Array = TypeVar("Array", NDArray[Any], torch.Tensor)
"""Arrays where documents are looked for on the host, tensors where the caller states them."""


def axes_of(position_ids: torch.Tensor) -> torch.Tensor:
    """Position ids with their axes in front; ids without axes get one."""
    return position_ids if position_ids.dim() == 3 else position_ids[None]


def starts_of(axes: Ids, real: Flags, previous: Ids, first_position: int) -> tuple[Flags, Flags, Flags]:
    """Find document starts in position ids ``[axes, batch, length]``.

    Returns:
        Three bool arrays ``[batch, length]``: starts; tokens on three axes that may be starts; and jumps after padding
        to another position than 0 or ``first_position``.
    """
    changed = changes(axes[0], real, previous, step=1)
    behind_padding = (previous >= 0) & (np.arange(real.shape[1]) - previous > 1)
    jumps = changed & behind_padding & (axes[0] != 0) & (axes[0] != first_position)
    starts = changed & ~jumps
    if len(axes) != 3:
        return starts, np.zeros_like(real), jumps
    with_images = (axes != axes[0]).any(axis=(0, 2))[:, None]
    nearest = np.maximum(previous, 0)
    left = np.stack([np.take_along_axis(axis, nearest, axis=1) for axis in axes])
    restarting = real & ((previous < 0) | restarts(axes, left))
    beside = np.arange(real.shape[1]) - previous == 1
    doubtful = with_images & real & ~restarting & ~goes_on(axes, left) & (beside | (axes[0] < left[0]))
    return np.where(with_images, restarting, starts), doubtful, jumps & ~with_images


def behind_padding(ids: Array, left: Array, left_starts: Array, first_position: int) -> Array:
    """Where a document starts behind an id that is one below its first position, although ids go on from it.

    Such an id is padding: ``attention_mask.cumsum(-1) - 1`` gives -1 to what is padded left, and RoBERTa's own count
    gives 1 where its documents start at 2. An id that itself goes on from another one is none, and 0 is none either:
    collators begin there whatever the model.

    Args:
        ids, left: the ids of some tokens, and of the tokens to their left.
        left_starts: whether the latter start documents.
        first_position: the position id of a document's first token.
    """
    found: Array = (ids == first_position) & (left == first_position - 1) & (left != 0) & left_starts
    return found


def restarts(ids: Array, left: Array) -> Array:
    """Where time, height and width (arrays or tensors ``[3, batch, length]``) restart.

    Inside a document, time is 0 only at the first token and in an image that starts there. All three are 0 only at the
    first token.
    """
    first: Array = (ids[0] == 0) & ((left[0] > 0) | ((ids[1] == 0) & (ids[2] == 0)))
    return first


def goes_on(ids: Array, left: Array) -> Array:
    """Where time, height and width continue from the token to the left as a model's ``get_rope_index`` counts them.

    Inside an image or a video, time stays or rises. A text token, and the first token of an image, has one number n on
    all axes, and the token before it has n - 1 on its largest axis. From Transformers 5.3 on, time is left out after a
    video: text continues from height and width, which may be below the last frame's time. The three axes may also be
    equal inside an image.
    """
    (t, h, w), (time, height, width) = ids, left
    beside_image = (t == h) & (t == w)
    follows = (t > height) & (t > width) & ((t == height + 1) | (t == width + 1) | (t == time + 1))
    of_its_time = (t == time) & ((height != time) | (width != time))
    continues: Array = (~beside_image & (t >= time)) | (beside_image & (follows | of_its_time))
    return continues


def previous_real(real: Flags) -> Ids:
    """Index of the nearest real token to the left in the row; -1 if there is none."""
    index = np.arange(real.shape[1])
    seen = np.maximum.accumulate(np.where(real, index, -1), axis=1)
    return np.concatenate([np.full((real.shape[0], 1), -1), seen[:, :-1]], axis=1)


def changes(ids: Ids, real: Flags, previous: Ids, step: int) -> Flags:
    """Real tokens that do not continue from the nearest real token to their left; ids may or may not count padding."""
    left = np.take_along_axis(ids, np.maximum(previous, 0), axis=1)
    apart = np.arange(ids.shape[1]) - previous
    continues = ((ids == left + step) | (ids == left + step * apart)) & (ids >= left)  # the largest int64 + 1 is < 0
    changed: Flags = real & ((previous < 0) | ~continues)
    return changed


def document_of(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """The number of each token's document, int64 ``[tokens]``. Nothing is read from the device.

    Args:
        cu_seqlens: integers ``[documents + 1]``: 0, then the end of every document.
        tokens: the number of tokens.
    """
    token = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens, token, right=True) - 1
