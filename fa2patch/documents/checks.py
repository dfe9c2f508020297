"""Checks of the arguments that describe documents: types, dtypes and shapes. Each check is made once."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..errors import BadCuSeqlens, BadPositionIds, BoundaryConflict

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_position_ids(position_ids: Any, shape: tuple[int, int] | None = None) -> None:
    """Raise :class:`BadPositionIds` unless these are integer ids that fit ``shape``, which is ``(batch, length)``."""
    if not isinstance(position_ids, torch.Tensor):
        raise BadPositionIds(
            f"position_ids: expected an integer tensor, found {type(position_ids).__name__}. "
            "Pass what the collator returns."
        )
    if position_ids.dtype not in _INTEGERS:
        raise BadPositionIds(f"position_ids: expected integers, found {position_ids.dtype}. Convert them with .long().")
    if not _is_dense(position_ids):
        raise BadPositionIds(f"position_ids: expected a dense tensor, found {described(position_ids)}.")
    found = tuple(position_ids.shape)
    if position_ids.dim() not in (1, 2, 3) or 0 in found:
        raise BadPositionIds(
            "position_ids: expected [batch, length], or [axes, batch, length] for mRoPE, "
            f"with at least one token; found {list(found)}."
        )
    if shape is not None and (found[-1] != shape[1] or (len(found) > 1 and found[-2] not in (1, shape[0]))):
        raise BadPositionIds(
            f"position_ids: expected [{shape[0]}, {shape[1]}] as the batch's ids, found {list(found)}. "
            "One position id is needed for each token."
        )


def require_no_wrap(dtype: torch.dtype, largest: int, counted: int) -> None:
    """Raise :class:`BadPositionIds` if a document of a packed row has as many tokens as its ids' dtype can count.

    Behind that, the ids of a longer document begin again, as if another one started.

    Args:
        dtype: the dtype of the ids.
        largest: the largest id.
        counted: the tokens of the longest document, and the position id of its first token.
    """
    if torch.iinfo(dtype).bits < 32 and largest == torch.iinfo(dtype).max < counted:
        raise BadPositionIds(
            f"position_ids: expected a dtype that holds the ids of the longest document, found {dtype} and ids up to "
            f"{largest}, which is its largest number: longer documents would restart behind it. Make the ids as int64."
        )


def check_cu_seqlens(cu_seqlens: Any) -> None:
    """Raise :class:`BadCuSeqlens` unless this is a dense integer tensor with at least two elements."""
    if is_integers(cu_seqlens) and cu_seqlens.numel() > 1:
        return
    raise BadCuSeqlens(f"cu_seq_lens: expected an integer tensor [documents + 1], found {described(cu_seqlens)}.")


def check_max_seqlen(max_seqlen: Any) -> None:
    """Raise :class:`BadCuSeqlens` unless this is an int below 2**31, an integer tensor with values, or None."""
    if isinstance(max_seqlen, torch.Tensor):
        if _is_dense(max_seqlen) and max_seqlen.dtype in _INTEGERS and max_seqlen.numel():
            return check_readable("max_length", max_seqlen, BadCuSeqlens)
    elif max_seqlen is None or (isinstance(max_seqlen, (int, np.integer)) and max_seqlen < 2**31):
        return None
    found = described(max_seqlen) if isinstance(max_seqlen, torch.Tensor) else repr(max_seqlen)
    raise BadCuSeqlens(f"max_length: expected the longest document's length, an int, found {found}.")


def check_seq_idx(seq_idx: Any, shape: tuple[int, int]) -> None:
    """Raise :class:`BadCuSeqlens` unless these are integers with values that fit ``shape``, ``(batch, length)``."""
    if not _is_dense(seq_idx) or seq_idx.dtype not in (*_INTEGERS, torch.bool):
        raise BadCuSeqlens(f"seq_idx: expected an integer tensor [batch, length], found {described(seq_idx)}.")
    if tuple(seq_idx.shape) not in (shape, (1, shape[1]), shape[1:]):
        raise BadCuSeqlens(f"seq_idx: expected [{shape[0]}, {shape[1]}], found {list(seq_idx.shape)}.")
    check_readable("seq_idx", seq_idx, BadCuSeqlens)


def check_mask(attention_mask: torch.Tensor, shape: tuple[int, int]) -> None:
    """Raise :class:`BoundaryConflict` unless these are real numbers of ``shape``, ``(batch, length)``."""
    if not _is_dense(attention_mask) or attention_mask.is_complex():
        raise BoundaryConflict(f"attention_mask: expected a tensor of numbers, found {described(attention_mask)}.")
    if tuple(attention_mask.shape) != shape:
        raise BoundaryConflict(
            f"attention_mask: expected [{shape[0]}, {shape[1]}], found {list(attention_mask.shape)}."
        )


def added_to_logits(found: str) -> str:
    """Return the text of the error for a 2-D mask with negative numbers beside a packed row."""
    return (
        f"attention_mask: expected zeros for padding and ones, or document numbers, found {found}. A mask that is "
        "added to logits cannot go with a packed row: leave it out."
    )


def check_readable(name: str, tensor: torch.Tensor, error: type[Exception]) -> None:
    """Raise ``error`` for a tensor on the meta device."""
    if tensor.device.type == "meta":
        raise error(f"{name}: expected a tensor with values, found one on the meta device.")


def is_integers(value: Any) -> bool:
    """Whether a value is a dense tensor of integers."""
    return _is_dense(value) and value.dtype in _INTEGERS


def _is_dense(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_nested


def described(value: Any) -> str:
    """The dtype and shape of a tensor, or the type of another object, for an error."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    if value.is_nested:
        return "a nested tensor"
    return f"{value.dtype} {list(value.shape)}" if _is_dense(value) else f"{value.dtype} {value.layout}"
