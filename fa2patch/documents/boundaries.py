"""Finds where documents start in a batch, with torch and numpy only.

A document starts at the first token of every row and wherever ``p[i] != p[i-1] + 1`` (rule 2 of CONTRIBUTING.md).
``cu_seq_lens_*``, then ``seq_idx``, then a 2-D mask of document numbers take precedence over ``position_ids``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch

from .._compile import compiling, uncompiled
from ..errors import BadCuSeqlens, BadPositionIds, BoundaryConflict

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(eq=False)
class Boundaries:
    """The boundaries of the documents of one batch, whose rows are laid end to end.

    Attributes:
        cu_seqlens: int32 tensor ``[documents + 1]`` on the batch's device: 0, then the end of every document.
        max_seqlen: length of the longest document in tokens, or an upper bound of it.
        positions: largest position id + 1; None if the ids were not read.
        made: objects that a kernel computes once per batch and reuses in later layers, such as a block mask.
    """

    cu_seqlens: torch.Tensor
    max_seqlen: int
    positions: int | None = field(default=None, repr=False)
    _lengths: tuple[int, ...] | None = field(default=None, repr=False)
    made: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Document lengths in tokens. The first access may read from the device; the result is kept."""
        if self._lengths is None:
            self._lengths = tuple(np.diff(_host(self.cu_seqlens)).tolist())
        return self._lengths

    def __len__(self) -> int:
        """The number of documents."""
        return int(self.cu_seqlens.shape[0]) - 1

    def chunked(self, size: int) -> Boundaries:
        """Boundaries with every document cut into chunks of ``size`` tokens, for chunked attention (Llama 4)."""
        if self.max_seqlen <= size:
            return self
        chunks = [min(size, length - at) for length in self.lengths for at in range(0, length, size)]
        cu = torch.tensor([0, *chunks], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return Boundaries(cu.to(self.cu_seqlens.device), size, self.positions, tuple(chunks))

    def padding_apart(self, attention_mask: torch.Tensor) -> Boundaries:
        """Boundaries with every document cut in two: its real tokens and the padding at its end.

        Bidirectional attention needs this, because real tokens would see the padding after them. Either part may be
        empty. Nothing is read from the device.

        Args:
            attention_mask: ``[batch, length]``; zeros only at the end of a document.
        """
        real = (attention_mask.flatten() != 0).to(self.cu_seqlens.device, torch.int32)
        seen = torch.nn.functional.pad(real.cumsum(0, dtype=torch.int32), (1, 0))[self.cu_seqlens.long()]
        ends = self.cu_seqlens[:-1] + seen.diff()
        cu = torch.cat([torch.stack([self.cu_seqlens[:-1], ends], dim=1).flatten(), self.cu_seqlens[-1:]])
        return Boundaries(cu, self.max_seqlen, self.positions)


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
    _check_readable("position_ids", position_ids, BadPositionIds)
    host = _host(_axes(position_ids).long())
    host = host if host.ndim == 3 else host[None]
    real = np.ones(host.shape[1:], dtype=bool)
    starts, doubtful, _ = _starts(host, real, _previous_real(real))
    _no_doubt(doubtful, host)
    return _from_cuts(starts, position_ids.device, int(host.max()) + 1)


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
        raise BadPositionIds(f"position_ids: expected a dense tensor, found {_described(position_ids)}.")
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
) -> Boundaries | None:
    """Find the boundaries of a packed batch, with one read from the device.

    A mask with negative values may need a second read. Ids of masked tokens are ignored. After padding, a document
    starts where the ids restart at 0 or ``first_position``. Any other jump there is treated as a filler, as
    Transformers' ``generate`` writes it, and the document continues.

    Args:
        shape: ``(batch, length)``.
        device: the device of the returned ``cu_seqlens``.
        position_ids: integers ``[length]``, ``[batch or 1, length]`` or ``[axes, batch or 1, length]``.
        attention_mask: ``[batch, length]``: zeros are padding; 1, 1, 2, 2, ... are document numbers.
        seq_idx: integers ``[length]`` or ``[batch or 1, length]``; the number changes from document to document.
        only_certain: with three axes, treat ambiguous tokens as continuing instead of raising an error.
        first_position: the position id of a document's first token in models that do not count from 0.
        training: whether a jump after padding to another position than 0 or ``first_position`` is an error.

    Returns:
        Boundaries in which each run of padding is a document of its own. None if no row holds more than one document;
        such a batch is dense.

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
        _check_readable("position_ids", position_ids, BadPositionIds)
    if seq_idx is not None:
        _check_seq_idx(seq_idx, shape)
    if attention_mask is not None:
        _check_mask(attention_mask, shape)
        _check_readable("attention_mask", attention_mask, BoundaryConflict)
        attention_mask = _numbers(attention_mask)
    given = {"attention_mask": attention_mask, "seq_idx": seq_idx}
    present = {name: ids.expand(shape) for name, ids in given.items() if ids is not None}
    axes = [] if position_ids is None else [axis.expand(shape) for axis in _axes(position_ids)]
    if not present and not axes:
        return None
    if device.type == "meta":
        raise BadPositionIds("position_ids: expected those of a batch with values, found one on the meta device.")
    read = _host(torch.stack([ids.detach().to(device, torch.int64) for ids in (*present.values(), *axes)]))
    host, positions = dict(zip(present, read)), read[len(present) :]
    mask = host.get("attention_mask")
    if mask is not None and mask.min() < 0:
        if (
            mask.max() <= 1
            and recognise(shape, device, position_ids=position_ids, seq_idx=seq_idx, only_certain=only_certain) is None
        ):
            return None
        row, token = np.argwhere(mask < 0)[0]
        raise BoundaryConflict(
            "attention_mask: expected zeros for padding and ones, or document numbers, found something else at row "
            f"{row}, token {token}. A mask that is added to logits cannot go with a packed row: leave it out."
        )
    real = np.ones(shape, dtype=bool) if mask is None else mask != 0
    previous = _previous_real(real)

    starts, doubtful, jumps = (
        _starts(positions, real, previous, first_position) if position_ids is not None else (None, None, None)
    )
    outright: dict[str, Any] = {}
    if "seq_idx" in host:
        outright["seq_idx"] = _changes(host["seq_idx"], real, previous, step=0)
    if mask is not None and mask.max() > 1:
        outright["the attention_mask of document numbers"] = _changes(mask, real, previous, step=0)
    if len(outright) == 2:
        (first, said), (second, other) = outright.items()
        _no_conflict(said != other, f"{first} and {second} begin different documents")
    for source, said in outright.items():
        if starts is not None:
            _no_conflict(starts & ~said, f"position_ids restart inside what {source} calls one document")
    if doubtful is not None and not (outright or only_certain):
        _no_doubt(doubtful, positions)
    if jumps is not None and training and not outright:
        _no_jump(jumps, positions, first_position)
    starts = next(iter(outright.values()), starts)
    if starts is None or (starts.sum(axis=1) <= 1).all():
        return None
    after_padding = np.zeros(shape, dtype=bool)
    after_padding[:, 1:] = ~real[:, :-1]
    holes = real & ~starts & after_padding
    if holes.any():
        row, token = np.argwhere(holes)[0]
        raise BoundaryConflict(
            f"the attention_mask hides tokens inside a document of a packed row (it goes on at row {row}, token "
            f"{token}). Padding may only stand between documents: drop the hidden tokens, or restart position_ids "
            "there."
        )
    starts_padding = ~real
    starts_padding[:, 1:] &= real[:, :-1]
    largest = int(positions.max()) + 1 if position_ids is not None else None
    return _from_cuts(starts | starts_padding, device, largest)


def from_cu_seqlens(
    cu_seqlens: torch.Tensor,
    max_seqlen: int | torch.Tensor | None,
    shape: tuple[int, int],
    *,
    cu_seqlens_k: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
) -> Boundaries:
    """Check boundaries that the caller passes, without a read from the device if ``max_seqlen`` is an int.

    On a CPU a mismatch of values raises at once. On other devices, and in a compiled graph on every device, it becomes
    a device-side assertion, which needs no synchronisation.

    Args:
        cu_seqlens: integers ``[documents + 1]`` (or ``[1, documents + 1]``): 0, ..., ``batch * length``.
        max_seqlen: length of the longest document in tokens, or an upper bound; computed from ``cu_seqlens`` if None.
        shape: ``(batch, length)``.
        cu_seqlens_k: the same for keys; must equal ``cu_seqlens``.
        position_ids: may restart only where a document starts; ids of masked tokens are ignored.
        attention_mask: ``[batch, length]``; zeros only at the end of a document, or over a whole document.

    Raises:
        BadCuSeqlens: ``cu_seqlens`` or ``max_seqlen`` have a wrong type, or do not fit the batch.
        BoundaryConflict: ``cu_seqlens_k``, ``position_ids`` or ``attention_mask`` contradict ``cu_seqlens``.
        BadPositionIds: ``position_ids`` have a wrong dtype or shape.
    """
    tokens = shape[0] * shape[1]
    for given in (cu_seqlens, cu_seqlens_k):
        if given is not None:
            check_cu_seqlens(given)
    if attention_mask is not None:
        _check_mask(attention_mask, shape)
    cu = cu_seqlens.flatten().to(torch.int32)
    _check_max_seqlen(max_seqlen)
    _require_ends(cu_seqlens.flatten(), tokens)
    if cu_seqlens_k is not None and cu_seqlens_k is not cu_seqlens:
        _require_same(cu, cu_seqlens_k.flatten())
    _require_agreement(cu, shape, position_ids, attention_mask)
    if isinstance(max_seqlen, torch.Tensor):
        max_seqlen = int(_host(max_seqlen).max())
    stated = Boundaries(cu, max_seqlen if max_seqlen is not None else 0)
    if max_seqlen is None:
        stated.max_seqlen = max(stated.lengths)
    else:
        longest = cu.diff().max() <= max_seqlen
        _require(longest, BadCuSeqlens, "max_length is {}, but cu_seq_lens hold a longer document.", max_seqlen)
    return stated


def check_cu_seqlens(cu_seqlens: Any) -> None:
    """Raise :class:`BadCuSeqlens` unless this is a dense integer tensor with at least two elements."""
    if _is_dense(cu_seqlens) and cu_seqlens.dtype in _INTEGERS and cu_seqlens.numel() > 1:
        return
    raise BadCuSeqlens(f"cu_seq_lens: expected an integer tensor [documents + 1], found {_described(cu_seqlens)}.")


def _check_max_seqlen(max_seqlen: Any) -> None:
    if isinstance(max_seqlen, torch.Tensor):
        if _is_dense(max_seqlen) and max_seqlen.dtype in _INTEGERS and max_seqlen.numel():
            return _check_readable("max_length", max_seqlen, BadCuSeqlens)
    elif max_seqlen is None or (isinstance(max_seqlen, (int, np.integer)) and max_seqlen < 2**31):
        return None
    found = _described(max_seqlen) if isinstance(max_seqlen, torch.Tensor) else repr(max_seqlen)
    raise BadCuSeqlens(f"max_length: expected the longest document's length, an int, found {found}.")


def _check_seq_idx(seq_idx: Any, shape: tuple[int, int]) -> None:
    if not _is_dense(seq_idx) or seq_idx.dtype not in (*_INTEGERS, torch.bool):
        raise BadCuSeqlens(f"seq_idx: expected an integer tensor [batch, length], found {_described(seq_idx)}.")
    if tuple(seq_idx.shape) not in (shape, (1, shape[1]), shape[1:]):
        raise BadCuSeqlens(f"seq_idx: expected [{shape[0]}, {shape[1]}], found {list(seq_idx.shape)}.")
    _check_readable("seq_idx", seq_idx, BadCuSeqlens)


def _check_mask(attention_mask: torch.Tensor, shape: tuple[int, int]) -> None:
    if not _is_dense(attention_mask) or attention_mask.is_complex():
        raise BoundaryConflict(f"attention_mask: expected a tensor of numbers, found {_described(attention_mask)}.")
    if tuple(attention_mask.shape) != shape:
        raise BoundaryConflict(
            f"attention_mask: expected [{shape[0]}, {shape[1]}], found {list(attention_mask.shape)}."
        )


def _check_readable(name: str, tensor: torch.Tensor, error: type[Exception]) -> None:
    if tensor.device.type == "meta":
        raise error(f"{name}: expected a tensor with values, found one on the meta device.")


def _is_dense(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_nested


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    if value.is_nested:
        return "a nested tensor"
    return f"{value.dtype} {list(value.shape)}" if _is_dense(value) else f"{value.dtype} {value.layout}"


def _numbers(mask: torch.Tensor) -> torch.Tensor:
    """A mask with -1 in the place of fractions, NaN, infinities and numbers of 2**31 or more."""
    if not mask.is_floating_point():
        return mask
    mask = mask.float() if mask.element_size() < 4 else mask  # torch 2.1 has no floor for half precision on a CPU
    return torch.where((mask == mask.floor()) & (mask.abs() < 2**31), mask, -1)


def positions_of(cu_seqlens: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Position ids, int64 ``[batch, length]``, that count from 0 in each document. Nothing is read from the device."""
    cu = cu_seqlens.flatten().long()
    token = torch.arange(shape[0] * shape[1], device=cu.device)
    document = torch.searchsorted(cu, token, right=True) - 1
    return (token - cu[document]).view(shape)


def largest(ids: torch.Tensor) -> int:
    """The largest id. This reads from the device once."""
    return int(_host(ids).max())


def _host(tensor: torch.Tensor) -> Any:
    """The tensor's values on the host. Every read of boundaries from the device goes through this function."""
    return tensor.detach().cpu().numpy()


def _axes(position_ids: torch.Tensor) -> torch.Tensor:
    return position_ids if position_ids.dim() == 3 else position_ids[None]


def _starts(axes: Any, real: Any, previous: Any, first_position: int = 0) -> tuple[Any, Any, Any]:
    """Find document starts in position ids ``[axes, batch, length]``.

    Returns:
        Three bool arrays ``[batch, length]``: starts; tokens on three axes that may be starts; and jumps after padding
        to another position than 0 or ``first_position``.
    """
    changes = _changes(axes[0], real, previous, step=1)
    behind_padding = (previous >= 0) & (np.arange(real.shape[1]) - previous > 1)
    jumps = changes & behind_padding & (axes[0] != 0) & (axes[0] != first_position)
    starts = changes & ~jumps
    if len(axes) != 3:
        return starts, np.zeros_like(real), jumps
    with_images = (axes != axes[0]).any(axis=(0, 2))[:, None]
    nearest = np.maximum(previous, 0)
    left = np.stack([np.take_along_axis(axis, nearest, axis=1) for axis in axes])
    restarts = real & ((previous < 0) | _restarts(axes, left))
    beside = np.arange(real.shape[1]) - previous == 1
    doubtful = with_images & real & ~restarts & ~_goes_on(axes, left) & (beside | (axes[0] < left[0]))
    return np.where(with_images, restarts, starts), doubtful, jumps & ~with_images


def _restarts(ids: Any, left: Any) -> Any:
    """Where time, height and width (arrays or tensors ``[3, batch, length]``) restart.

    Inside a document, time is 0 only at the first token and in an image that starts there. All three are 0 only at the
    first token.
    """
    return (ids[0] == 0) & ((left[0] > 0) | ((ids[1] == 0) & (ids[2] == 0)))


def _goes_on(ids: Any, left: Any) -> Any:
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
    return (~beside_image & (t >= time)) | (beside_image & (follows | of_its_time))


def _no_doubt(doubtful: Any, axes: Any) -> None:
    if doubtful.any():
        row, token = np.argwhere(doubtful)[0]
        found = [axes[:, row, at].tolist() for at in (token - 1, token)]
        raise BadPositionIds(
            "position_ids: expected time, height and width as a model's get_rope_index counts them in each document, "
            f"which starts at 0. Found {found[0]} and then {found[1]} at row {row}, token {token}: that may be a "
            "document's start, or not. Say where documents start by cu_seq_lens_q, or by ids [4, batch, length] with "
            "the tokens' own count in front (fa2patch.DataCollatorForMultimodalFlattening gives both)."
        )


def _no_jump(jumps: Any, axes: Any, first_position: int) -> None:
    if jumps.any():
        row, token = np.argwhere(jumps)[0]
        raise BoundaryConflict(
            f"position_ids jump to {axes[0, row, token]} behind padding (row {row}, token {token}): that may be a "
            "document's start, or a filler. Expected ids that go on from the last real token, or restart at "
            f"{first_position}. Say where documents start by cu_seq_lens_q, seq_idx or an attention_mask of document "
            "numbers, or let ids restart there."
        )


def _previous_real(real: Any) -> Any:
    """Index of the nearest real token to the left in the row; -1 if there is none."""
    index = np.arange(real.shape[1])
    seen = np.maximum.accumulate(np.where(real, index, -1), axis=1)
    return np.concatenate([np.full((real.shape[0], 1), -1), seen[:, :-1]], axis=1)


def _changes(ids: Any, real: Any, previous: Any, step: int) -> Any:
    """Real tokens that do not continue from the nearest real token to their left; ids may or may not count padding."""
    left = np.take_along_axis(ids, np.maximum(previous, 0), axis=1)
    apart = np.arange(ids.shape[1]) - previous
    goes_on = ((ids == left + step) | (ids == left + step * apart)) & (ids >= left)  # the largest int64 + 1 is < 0
    return real & ((previous < 0) | ~goes_on)


def _no_conflict(conflicts: Any, what: str) -> None:
    if conflicts.any():
        row, token = np.argwhere(conflicts)[0]
        raise BoundaryConflict(
            f"{what}: at row {row}, token {token}. Let both describe the same documents, or pass only one of them."
        )


def _from_cuts(starts: Any, device: torch.device, positions: int | None) -> Boundaries:
    ends = np.append(np.flatnonzero(starts.ravel()), starts.size)
    lengths = np.diff(ends)
    cu = torch.from_numpy(ends.astype(np.int32)).to(device, non_blocking=True)
    return Boundaries(cu, int(lengths.max()), positions, tuple(lengths.tolist()))


def _assert_async(held: torch.Tensor, message: str) -> None:
    """Assert on the device, without a synchronisation."""
    torch.ops.aten._assert_async.msg(held, message)


def _require(held: torch.Tensor, error: type[Exception], message: str, *numbers: int) -> None:
    if compiling():  # a number in the message would become a constant of the graph
        _assert_async(held, message.replace("{}", "(what was given)"))
    elif held.device.type != "cpu":
        _assert_async(held, message.format(*numbers))
    elif not bool(_host(held)):
        raise error(message.format(*numbers))


def _require_ends(cu: torch.Tensor, tokens: int) -> None:
    if cu.device.type == "cpu" and not compiling():
        found: Sequence[int] = _host(cu).tolist()
        if found[0] != 0 or found[-1] != tokens or any(b < a for a, b in zip(found, found[1:])):
            _bad_ends(found, tokens)
    else:
        held = (cu[0] == 0) & (cu[-1] == tokens) & (cu.diff() >= 0).all()
        _require(held, BadCuSeqlens, "cu_seq_lens must rise from 0 to the batch's {} tokens", tokens)


def _bad_ends(found: Sequence[int], tokens: int) -> NoReturn:
    shown = ", ".join(map(str, found[:8])) + (", ..." if len(found) > 8 else "")
    raise BadCuSeqlens(
        f"cu_seq_lens must rise from 0 to the number of tokens, {tokens} (batch x length, padding included); "
        f"found [{shown}] ending in {found[-1]}. Make them from this very batch, after truncation and padding."
    )


def _require_same(cu: torch.Tensor, cu_k: torch.Tensor) -> None:
    message = "cu_seq_lens_q and cu_seq_lens_k differ: in training every query's document is its keys' document."
    if cu.shape != cu_k.shape:
        raise BoundaryConflict(message)
    _require((cu == cu_k).all(), BoundaryConflict, message)


def _require_agreement(
    cu: torch.Tensor,
    shape: tuple[int, int],
    position_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
) -> None:
    starts = torch.zeros(shape[0] * shape[1] + 1, dtype=torch.bool, device=cu.device)
    starts = starts.index_fill(0, cu.long(), True)[:-1].view(shape)
    _require(
        starts[:, 0].all(),
        BadCuSeqlens,
        "cu_seq_lens hold a document that runs on from one row of {} tokens into the next. "
        "A document starts at the first token of every row.",
        shape[1],
    )
    real = torch.ones_like(starts) if attention_mask is None else attention_mask.to(cu.device) != 0
    if attention_mask is not None:
        numbers = attention_mask.to(cu.device, torch.int64)
        changed = (numbers[:, 1:] != numbers[:, :-1]) & real[:, 1:] & real[:, :-1] & ~starts[:, 1:]
        _require(
            ~changed.any(),
            BoundaryConflict,
            "the attention_mask's document numbers change inside what cu_seq_lens call one document. Let both describe "
            "the same documents, or pass only one of them.",
        )
        hidden_then_real = ~real[:, :-1] & real[:, 1:] & ~starts[:, 1:]
        _require(
            ~hidden_then_real.any(),
            BoundaryConflict,
            "the attention_mask hides tokens before real ones of the same document of cu_seq_lens. Padding may only "
            "end a document, or be one.",
        )
    if position_ids is not None:
        check_position_ids(position_ids, shape)
        axes = _axes(position_ids).to(cu.device, torch.int64)
        axes = axes.expand(len(axes), *shape)
        jumps = axes[0, :, 1:] != axes[0, :, :-1] + 1
        if len(axes) == 3:
            jumps &= _restarts(axes[..., 1:], axes[..., :-1]) | ~_goes_on(axes[..., 1:], axes[..., :-1])
        restarts = jumps & ~starts[:, 1:] & real[:, 1:]
        _require(
            ~restarts.any(),
            BoundaryConflict,
            "position_ids restart inside what cu_seq_lens call one document. Let both describe the same documents, "
            "or pass only one of them.",
        )
