"""Finds where documents start in a batch, with torch and numpy only.

A document starts at the first token of every row and wherever ``p[i] != p[i-1] + 1`` (rule 2 of CONTRIBUTING.md).
``cu_seq_lens_*``, then ``seq_idx``, then a 2-D mask of document numbers take precedence over ``position_ids``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from .._torch import uncompiled
from ..errors import BadPositionIds, BoundaryConflict
from . import device as devices
from .boundaries import Boundaries, from_starts
from .checks import added_to_logits, check_mask, check_position_ids, check_readable, check_seq_idx, require_no_wrap
from .counted import documents_of, is_plain
from .starts import Flags, Ids, axes_of, behind_padding, changes, previous_real, starts_of


def boundaries(position_ids: torch.Tensor) -> Boundaries:
    """Find the boundaries of the documents that ``position_ids`` describe.

    A document starts at the first token of every row and wherever an id is not its left neighbour's plus one. With four
    axes, the first axis (text) is used. With three axes (time, height, width), image tokens do not count up: in a row
    that has such tokens, a document starts where time goes back to 0 or all three axes are 0.

    Args:
        position_ids: integers ``[length]``, ``[batch, length]`` or ``[axes, batch, length]`` (mRoPE).

    Returns:
        :class:`Boundaries` over the ``batch * length`` tokens, row after row.

    Raises:
        BadPositionIds: the ids are not an integer tensor of such a shape, or are empty; or ids on three axes neither
            restart nor continue as a model counts them.
    """
    check_position_ids(position_ids)
    check_readable("position_ids", position_ids, BadPositionIds)
    if is_plain(position_ids, None, None):
        found = documents_of(_rows(position_ids), position_ids.device, always=True)
        assert found is not None, "it is asked for always"
        return found
    axes = np.array(devices.read(position_ids.long()), ndmin=3)
    starts = _starts(_Said((axes.shape[1], axes.shape[2]), axes))
    return from_starts(starts, position_ids.device, int(axes.max()) + 1)


@dataclass(eq=False)
class _Said:
    """What a batch says of its documents, on the host.

    Attributes:
        shape: ``(batch, length)``.
        axes: the position ids, int64 ``[axes, batch, length]``; no axes if there are none.
        mask, seq_idx: int64 arrays ``[batch, length]``, or None.
        real: bool ``[batch, length]``: tokens that the mask does not hide.
        previous: for each token the index of the nearest real token to its left, or -1.
    """

    shape: tuple[int, int]
    axes: Ids
    mask: Ids | None = None
    seq_idx: Ids | None = None
    real: Flags = field(init=False)
    previous: Ids = field(init=False)

    def __post_init__(self) -> None:
        self.real = np.ones(self.shape, dtype=bool) if self.mask is None else self.mask != 0
        self.previous = previous_real(self.real)


@uncompiled
def recognise(
    shape: tuple[int, int],
    device: torch.device,
    *,
    position_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    only_certain: bool = False,
    first_position: int = 0,
    training: bool = False,
    always: bool = False,
) -> Boundaries | None:
    """Find the boundaries of a packed batch, with one read from the device.

    Ids of masked tokens are ignored. After padding, a document starts where the ids restart at 0 or ``first_position``.
    Any other jump there is treated as a filler, as Transformers' ``generate`` writes it, and the document continues.

    Args:
        shape: ``(batch, length)``.
        device: the device of the returned ``cu_seqlens``.
        position_ids: integers ``[length]``, ``[batch or 1, length]`` or ``[axes, batch or 1, length]``.
        attention_mask: ``[batch, length]``: zeros are padding; 1, 1, 2, 2, ... are document numbers.
        seq_idx: integers ``[length]`` or ``[batch or 1, length]``; the number changes from document to document.
        only_certain: with three axes, treat ambiguous tokens as continuing instead of raising an error.
        first_position: the position id of a document's first token in models that do not count from 0.
        training: whether a jump after padding to another position than 0 or ``first_position`` is an error.
        always: whether to return boundaries also if no row holds more than one document.

    Returns:
        Boundaries in which each run of padding is a document of its own. None if no row holds more than one document,
        unless ``always`` is set; such a batch is dense.

    Raises:
        BadPositionIds: ``position_ids`` have a wrong dtype or shape, or ids on three axes neither restart nor continue
            as a model counts them.
        BadCuSeqlens: ``seq_idx`` has a wrong dtype or shape.
        BoundaryConflict: two sources contradict each other; padding is inside a document of a packed row; the mask of
            a packed row holds other values than zeros, ones and document numbers; or, in training, ids jump after
            padding and neither ``seq_idx`` nor document numbers say whether a document starts.
    """
    if position_ids is not None:
        check_position_ids(position_ids, shape)
    if position_ids is not None and is_plain(position_ids, attention_mask, seq_idx) and device.type != "meta":
        check_readable("position_ids", position_ids, BadPositionIds)
        return documents_of(_rows(position_ids).expand(shape), device, always, first_position)
    said = _read(shape, device, position_ids, attention_mask, seq_idx)
    if said is None:
        return None
    if said.mask is not None and said.mask.min() < 0:
        _require_told_apart(said.mask)
        _require_dense(said, said.mask, only_certain)
        return None
    starts = _starts(said, only_certain, first_position, training)
    packed = _packed(starts)
    if not (always or packed):
        return None
    positions = int(said.axes.max()) + 1 if len(said.axes) else None
    found = from_starts(_with_padding(starts, said.real), device, positions)
    if packed and position_ids is not None:
        require_no_wrap(position_ids.dtype, int(said.axes.max()), found.max_seqlen + first_position)
    return found


def _read(
    shape: tuple[int, int],
    device: torch.device,
    position_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
) -> _Said | None:
    """Check what was given and read it from the device, once; None if nothing was given."""
    if position_ids is not None:
        check_readable("position_ids", position_ids, BadPositionIds)
    if seq_idx is not None:
        check_seq_idx(seq_idx, shape)
    if attention_mask is not None:
        check_mask(attention_mask, shape)
        check_readable("attention_mask", attention_mask, BoundaryConflict)
        attention_mask = whole_numbers(attention_mask)
    given = {"mask": attention_mask, "seq_idx": seq_idx}
    present = {name: ids.expand(shape) for name, ids in given.items() if ids is not None}
    axes = [] if position_ids is None else [axis.expand(shape) for axis in axes_of(position_ids)]
    if not present and not axes:
        return None
    if device.type == "meta":
        raise BadPositionIds("position_ids: expected those of a batch with values, found one on the meta device.")
    read = devices.read(torch.stack([ids.detach().to(device, torch.int64) for ids in (*present.values(), *axes)]))
    return _Said(shape, read[len(present) :], **dict(zip(present, read)))


def _rows(position_ids: torch.Tensor) -> torch.Tensor:
    """Position ids on one axis as ``[batch, length]``."""
    return position_ids.reshape(-1, position_ids.shape[-1])


_MERGED = -(2**40)
"""What stands in the place of document numbers that their dtype cannot tell from others. float32 holds it."""


def whole_numbers(mask: torch.Tensor) -> torch.Tensor:
    """A mask with -1 in the place of fractions, NaN, infinities and numbers of 2**31 or more.

    :data:`_MERGED` is in the place of numbers that may have been other ones before they were stored: from 256 on in
    bfloat16, 2048 in float16 and 2**24 in float32, as there every second number becomes its neighbour; and the 0 behind
    254 and 255 in uint8.
    """
    if mask.dtype == torch.uint8:
        wrapped = (mask[:, 1:] == 0) & (mask[:, :-1] == 255) & (mask == 254).any()
        return mask.long().masked_fill(torch.nn.functional.pad(wrapped, (1, 0)), _MERGED)
    if not mask.is_floating_point():
        return mask
    merged_from = 2 / torch.finfo(mask.dtype).eps
    mask = mask.float() if mask.element_size() < 4 else mask  # torch 2.1 has no floor for half precision on a CPU
    whole = torch.where((mask == mask.floor()) & (mask.abs() < 2**31), mask, -1)
    return torch.where(whole >= merged_from, _MERGED, whole)


def _packed(starts: Flags) -> bool:
    return bool((starts.sum(axis=1) > 1).any())


def _require_told_apart(mask: Ids) -> None:
    if (mask == _MERGED).any():
        row, token = np.argwhere(mask == _MERGED)[0]
        raise BoundaryConflict(
            f"attention_mask: expected document numbers that its dtype can tell apart, found one at row {row}, token "
            f"{token}, that may have been another number before it was stored: in half precision every second number "
            "becomes its neighbour from 256 (bfloat16) or 2048 (float16) on, and uint8 begins again behind 255. Make "
            "the numbers as int64, or pass position_ids that restart."
        )


def _require_dense(said: _Said, mask: Ids, only_certain: bool) -> None:
    """Refuse a packed batch with negative numbers in its mask, because such a mask is added to logits."""
    if mask.max() > 1 or _packed(_starts(replace(said, mask=None), only_certain)):
        row, token = np.argwhere(mask < 0)[0]
        raise BoundaryConflict(added_to_logits(f"something else at row {row}, token {token}"))


def _starts(said: _Said, only_certain: bool = False, first_position: int = 0, training: bool = False) -> Flags:
    """First tokens of documents, bool ``[batch, length]``; none if nothing says where documents start.

    Explicit statements win over ``position_ids``. A contradiction between two sources is an error.
    """
    outright: dict[str, Flags] = {}
    if said.seq_idx is not None:
        outright["seq_idx"] = changes(said.seq_idx, said.real, said.previous, step=0)
    if said.mask is not None and said.mask.max() > 1:
        numbers = changes(said.mask, said.real, said.previous, step=0)
        outright["the attention_mask of document numbers"] = numbers
    if len(outright) == 2:
        (first, one), (second, other) = outright.items()
        _no_conflict(one != other, f"{first} and {second} begin different documents")
    if not len(said.axes):
        return next(iter(outright.values()), np.zeros_like(said.real))
    starts, doubtful, jumps = starts_of(said.axes, said.real, said.previous, first_position)
    for source, stated in outright.items():
        _no_conflict(starts & ~stated, f"position_ids restart inside what {source} calls one document")
    if not (outright or only_certain):
        _no_doubt(doubtful, said.axes)
    if training and not outright:
        _no_jump(jumps, said.axes, first_position)
    if not outright and _packed(starts):
        nearest, ids = np.maximum(said.previous, 0), said.axes[0]
        left, left_starts = (np.take_along_axis(values, nearest, axis=1) for values in (ids, starts))
        starts |= said.real & (said.previous >= 0) & behind_padding(ids, left, left_starts, first_position)
    return next(iter(outright.values()), starts)


def _with_padding(starts: Flags, real: Flags) -> Flags:
    """The first tokens of documents and of runs of padding. Padding inside a document is an error."""
    turns = np.ones_like(real)
    turns[:, 1:] = real[:, 1:] != real[:, :-1]
    holes = turns & real & ~starts
    if holes.any():
        row, token = np.argwhere(holes)[0]
        raise BoundaryConflict(
            f"the attention_mask hides tokens inside a document of a packed row (it goes on at row {row}, token "
            f"{token}). Padding may only stand between documents: drop the hidden tokens, or restart position_ids "
            "there."
        )
    return starts | (turns & ~real)


def _no_doubt(doubtful: Flags, axes: Ids) -> None:
    if doubtful.any():
        row, token = np.argwhere(doubtful)[0]
        found = [axes[:, row, at].tolist() for at in (token - 1, token)]
        raise BadPositionIds(
            "position_ids: expected time, height and width as a model's get_rope_index counts them in each document, "
            f"which starts at 0. Found {found[0]} and then {found[1]} at row {row}, token {token}: that may be a "
            "document's start, or not. Say where documents start by cu_seq_lens_q, or by ids [4, batch, length] with "
            "the tokens' own count in front (fa2patch.DataCollatorForMultimodalFlattening gives both)."
        )


def _no_jump(jumps: Flags, axes: Ids, first_position: int) -> None:
    if jumps.any():
        row, token = np.argwhere(jumps)[0]
        raise BoundaryConflict(
            f"position_ids jump to {axes[0, row, token]} behind padding (row {row}, token {token}): that may be a "
            "document's start, or a filler. Expected ids that go on from the last real token, or restart at "
            f"{first_position}. Say where documents start by cu_seq_lens_q, seq_idx or an attention_mask of document "
            "numbers, or let ids restart there."
        )


def _no_conflict(conflicts: Flags, what: str) -> None:
    if conflicts.any():
        row, token = np.argwhere(conflicts)[0]
        raise BoundaryConflict(
            f"{what}: at row {row}, token {token}. Let both describe the same documents, or pass only one of them."
        )
