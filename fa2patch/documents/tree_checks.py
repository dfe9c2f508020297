"""Checks of the segments' parents, without a read from a device other than a CPU."""

from __future__ import annotations

import torch

from ..errors import BadBatch, BadParents
from .checks import check_position_ids, described, is_integers
from .device import require
from .names import IGNORED_LABEL
from .starts import axes_of, goes_on, restarts


def require_tree(
    cu: torch.Tensor,
    parents: torch.Tensor,
    shape: tuple[int, int],
    position_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
) -> torch.Tensor:
    """Require that parents describe a tree of the segments, and return them as int32 on ``cu``'s device.

    Args:
        cu: int32 ``[segments + 1]``, the segments' boundaries, checked before.
        parents: what the caller gave as ``segment_parents``.
        shape: ``(batch, length)``.
        position_ids: the batch's ids, or None.
        attention_mask: ``[batch, length]``, or None.

    Raises:
        BadParents: a parent does not come before its segment, lies in another row or has no tokens; a segment with a
            parent has none; ``position_ids`` do not go on from the parent's; or the mask hides a token.
    """
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
