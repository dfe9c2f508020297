"""What rides on a tensor from one forward to the next: the only place where fa2patch puts an attribute on a tensor.

A model's own code hands its position ids (or input ids) down to the models and modules inside it, and has no argument
for anything else. What fa2patch found of them is attached to them. A copy of the tensor does not have the attribute, so
whoever attaches something asks afterwards whether it was taken: luggage that got lost is an error, not a dense batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..errors import PackingNotIsolated

MASK = "mask"
"""On ``position_ids``: the :class:`PackedMask` that an outer model found, or None where it found a dense batch."""

DOCUMENTS = "documents"
"""On ``position_ids``: the :class:`Boundaries`, for modules that must compute each document by itself."""

POOLED = "pooled"
"""On ``input_ids`` or ``inputs_embeds``: the packed row of a head that pools documents."""

_ATTRIBUTE = "_fa2patch"


@dataclass(eq=False)
class Piece:
    """One thing that rides on a tensor.

    Attributes:
        kind: what it is: :data:`MASK`, :data:`DOCUMENTS` or :data:`POOLED`.
        content: the thing itself.
        delivered: whether somebody has taken it.
    """

    kind: str
    content: Any
    delivered: bool = False


def attach(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """A view of the tensor on which the piece rides, beside what rides on the tensor already."""
    carrying = tensor.view_as(tensor)
    setattr(carrying, _ATTRIBUTE, {**getattr(tensor, _ATTRIBUTE, {}), piece.kind: piece})
    return carrying


def find(tensor: Any, kind: str) -> Piece | None:
    """The piece of this kind that rides on a tensor, without taking it."""
    found: Piece | None = getattr(tensor, _ATTRIBUTE, {}).get(kind) if isinstance(tensor, torch.Tensor) else None
    return found


def take(tensor: Any, kind: str) -> Any:
    """The content of the piece of this kind, which then counts as delivered; None where there is none."""
    piece = find(tensor, kind)
    if piece is None:
        return None
    piece.delivered = True
    return piece.content


def require_delivered(piece: Piece | None, model: Any) -> None:
    """Raise :class:`PackingNotIsolated` where nobody has taken the piece during the model's forward."""
    if piece is None or piece.delivered:
        return
    tensor = "input ids" if piece.kind == POOLED else "position_ids"
    raise PackingNotIsolated(
        f"{type(model).__name__} found this batch packed and handed its documents on with the {tensor}, but they did "
        f"not arrive where they are needed: something inside the model copies the {tensor} or makes others (a hook, "
        "offloading, upstream's merge of pictures into the row). Hand it tensors as they are, remove the hook, or "
        "train this model padded."
    )
