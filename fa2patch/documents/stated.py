"""Boundaries that the caller states, ``cu_seq_lens_*`` and ``segment_parents``, checked without a read from the device.

A CPU is read: there a mismatch of values raises at once.

Lengths may start a document where ``position_ids`` go on, because they say more than the ids. They must start one where
the ids restart. ``segment_parents`` need lengths, because ids that go on from a parent look like any other ids.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .._torch import compiling
from ..errors import BadBatch, BadCuSeqlens, BadParents, BoundaryConflict
from . import device
from .boundaries import Boundaries, largest
from .checks import (
    added_to_logits,
    check_cu_seqlens,
    check_mask,
    check_max_seqlen,
    check_position_ids,
    described,
    is_integers,
)
from .device import Check, require, require_all
from .names import IGNORED_LABEL
from .starts import axes_of, goes_on, restarts


def from_cu_seqlens(
    cu_seqlens: torch.Tensor,
    max_seqlen: int | torch.Tensor | None,
    shape: tuple[int, int],
    *,
    cu_seqlens_k: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    parents: torch.Tensor | None = None,
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
        parents: integers ``[segments]``: the number of the segment that each segment of ``cu_seqlens`` continues, which
            comes before it in the same row, or -1. ``position_ids`` then go on from the parent's last one, and the mask
            may only hold ones.

    Raises:
        BadCuSeqlens: ``cu_seqlens`` or ``max_seqlen`` have a wrong type, or do not fit the batch.
        BadParents: ``parents`` are no tree of the segments, or ``position_ids`` do not go on from them.
        BoundaryConflict: ``cu_seqlens_k``, ``position_ids`` or ``attention_mask`` contradict ``cu_seqlens``.
        BadPositionIds: ``position_ids`` have a wrong dtype or shape.
    """
    tokens = shape[0] * shape[1]
    for given in (cu_seqlens, cu_seqlens_k):
        if given is not None:
            check_cu_seqlens(given)
    if attention_mask is not None:
        check_mask(attention_mask, shape)
    cu = cu_seqlens.flatten().to(torch.int32)
    check_max_seqlen(max_seqlen)
    if isinstance(max_seqlen, torch.Tensor):
        max_seqlen = largest(max_seqlen)
    if cu.device.type == "cpu" and not compiling():
        _require_ends(cu_seqlens.flatten(), tokens)
    require_all(
        [
            *_ends(cu, tokens, max_seqlen),
            *(_same(cu, cu_seqlens_k.flatten()) if cu_seqlens_k is not None and cu_seqlens_k is not cu_seqlens else ()),
            *_agreement(cu, shape, position_ids, attention_mask),
        ]
    )
    if parents is not None:
        parents = _require_tree(cu, parents, shape, position_ids, attention_mask)
    stated = Boundaries(cu, max_seqlen if max_seqlen is not None else 0, parents=parents)
    if max_seqlen is None:
        stated.max_seqlen = max(stated.lengths)
    return stated


def _require_ends(cu: torch.Tensor, tokens: int) -> None:
    """Raise an error that shows the numbers, for boundaries on a CPU. :func:`_ends` would only say what is wrong."""
    found: list[int] = device.read(cu).tolist()
    if found[0] != 0 or found[-1] != tokens or any(b < a for a, b in zip(found, found[1:])):
        shown = ", ".join(map(str, found[:8])) + (", ..." if len(found) > 8 else "")
        raise BadCuSeqlens(
            f"cu_seq_lens must rise from 0 to the number of tokens, {tokens} (batch x length, padding included); "
            f"found [{shown}] ending in {found[-1]}. Make them from this very batch, after truncation and padding."
        )


def _ends(cu: torch.Tensor, tokens: int, max_seqlen: int | None) -> Iterator[Check]:
    shortest, longest = torch.aminmax(cu.diff())
    rise = "cu_seq_lens must rise from 0 to the batch's {} tokens."
    for held in (cu[0] == 0, cu[-1] == tokens, shortest >= 0):
        yield Check(held, BadCuSeqlens, rise, (tokens,))
    if max_seqlen is not None:
        message = "max_length is {}, but cu_seq_lens hold a longer document. Pass the longest length, or none."
        yield Check(longest <= max_seqlen, BadCuSeqlens, message, (max_seqlen,))


def _same(cu: torch.Tensor, cu_k: torch.Tensor) -> Iterator[Check]:
    message = (
        "cu_seq_lens_q and cu_seq_lens_k differ: in training every query's document is its keys' document. Pass the "
        "same lengths for both."
    )
    if cu.shape != cu_k.shape:
        raise BoundaryConflict(message)
    yield Check((cu == cu_k).all(), BoundaryConflict, message)


def _agreement(
    cu: torch.Tensor,
    shape: tuple[int, int],
    position_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
) -> Iterator[Check]:
    tokens = shape[0] * shape[1]
    starts = torch.zeros(tokens + 1, dtype=torch.bool, device=cu.device)
    starts = starts.index_fill(0, cu.long().clamp(0, tokens), True)[:-1].view(shape)  # a wrong end is told by _ends
    yield Check(
        starts[:, 0].all(),
        BadCuSeqlens,
        "a document of cu_seq_lens runs on into the next row. At the first token of every row, of {} tokens, a "
        "document must start.",
        (shape[1],),
    )
    real = None if attention_mask is None else attention_mask.to(cu.device) != 0
    if attention_mask is not None and real is not None:
        yield from _mask_agrees(starts, real, attention_mask.to(cu.device))
    if position_ids is not None:
        check_position_ids(position_ids, shape)
        ids = axes_of(position_ids).to(cu.device, torch.int64)
        yield _ids_agree(starts, real, ids.expand(len(ids), *shape))


def _mask_agrees(starts: torch.Tensor, real: torch.Tensor, numbers: torch.Tensor) -> Iterator[Check]:
    yield Check((numbers >= 0).all(), BoundaryConflict, added_to_logits("negative numbers"))
    numbers = numbers.to(torch.int64)
    changed = (numbers[:, 1:] != numbers[:, :-1]) & real[:, 1:] & real[:, :-1]
    yield Check(
        (changed <= starts[:, 1:]).all(),
        BoundaryConflict,
        "the attention_mask's document numbers change inside what cu_seq_lens call one document. Let both describe "
        "the same documents, or pass only one of them.",
    )
    yield Check(
        ((real[:, 1:] > real[:, :-1]) <= starts[:, 1:]).all(),
        BoundaryConflict,
        "the attention_mask hides tokens before real ones of the same document of cu_seq_lens. Padding may only "
        "end a document, or be one.",
    )


def _ids_agree(starts: torch.Tensor, real: torch.Tensor | None, axes: torch.Tensor) -> Check:
    jumps = axes[0].diff() != 1
    if len(axes) == 3:
        jumps &= restarts(axes[..., 1:], axes[..., :-1]) | ~goes_on(axes[..., 1:], axes[..., :-1])
    if real is not None:
        jumps &= real[:, 1:]
    return Check(
        (jumps <= starts[:, 1:]).all(),  # a <= b of bools: a implies b, in one operator
        BoundaryConflict,
        "position_ids restart inside what cu_seq_lens call one document. Let both describe the same documents, "
        "or pass only one of them.",
    )


def _require_tree(
    cu: torch.Tensor,
    parents: torch.Tensor,
    shape: tuple[int, int],
    position_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
) -> torch.Tensor:
    """Require that parents describe a tree of the segments of ``cu``, and return them as int32 on its device."""
    segments = cu.shape[0] - 1
    if not is_integers(parents) or parents.dim() == 0 or parents.numel() != segments:
        raise BadParents(
            f"segment_parents: expected one integer for each of the {segments} segments of cu_seq_lens, found "
            f"{described(parents)}."
        )
    given = parents.flatten().to(cu.device, torch.int64)
    number = torch.arange(segments, device=cu.device)
    require(
        ((given >= -1) & (given < number)).all(),
        BadParents,
        "segment_parents: expected for each segment the number of an earlier one, or -1. Put a prompt in front of what "
        "continues it.",
    )
    starts, ends = cu[:-1].long(), cu[1:].long()
    has, parent = given >= 0, given.clamp(min=0)
    require(
        (~has | ((starts // shape[1] == starts[parent] // shape[1]) & (ends > starts) & (ends > starts)[parent])).all(),
        BadParents,
        "segment_parents: a segment and its parent must have tokens and be in one row. Leave out empty segments.",
    )
    if attention_mask is not None:
        require(
            (attention_mask == 1).all(),
            BadParents,
            "segment_parents came with an attention_mask that is not all ones: whether a parent's hidden tokens are "
            "seen is not known. Leave the mask out, and make padding a segment of its own.",
        )
    if position_ids is not None:
        check_position_ids(position_ids, shape)
        ids = axes_of(position_ids).to(cu.device, torch.int64)
        _require_ids_go_on(ids.expand(len(ids), *shape).flatten(1), has, starts, ends, parent)
    return given.to(torch.int32)


def _require_ids_go_on(
    ids: torch.Tensor, has: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, parent: torch.Tensor
) -> None:
    """Require that the first id of each segment with a parent goes on from the parent's last; ``[axes, tokens]``."""
    last = ids.shape[1] - 1
    first, before = ids[:, starts.clamp(max=last)], ids[:, (ends[parent] - 1).clamp(min=0)]
    continues = first[0] == before[0] + 1
    if len(ids) == 3:
        one, other = first[:, None], before[:, None]
        continues |= (goes_on(one, other) & ~restarts(one, other))[0]
    require(
        (~has | continues).all(),
        BadParents,
        "segment_parents: the position_ids of a segment do not go on from its parent's last one. Count them along the "
        "path from the root, as fa2patch.packing.share does.",
    )


def require_no_first_labels(rows: torch.Tensor, at: torch.Tensor, parents: torch.Tensor) -> None:
    """Require -100 at the first token of each segment with a parent.

    Args:
        rows: labels ``[tokens + 1, ...]``; the last entry is of a segment without tokens behind the row.
        at: each segment's first token.
        parents: each segment's parent, or -1.

    Raises:
        BadBatch: such a token has a label.
    """
    ignored = (rows.flatten(1) == IGNORED_LABEL).all(1)[at] | (parents.to(at.device) < 0)
    require(
        ignored.all(),
        BadBatch,
        "labels: the first token of a segment with a parent has a label, but no token of the row predicts it. Let "
        "each branch start with the last token that it shares, and give that token the label -100, as "
        "fa2patch.packing.share does.",
    )
