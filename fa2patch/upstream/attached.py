"""Objects that ride on a tensor from one forward to the next, as an attribute of the tensor.

A model's own code passes its position ids (or input ids) down to the modules inside it and has no argument for
boundaries, so they are attached to these tensors. A copy of the tensor loses the attribute. So whoever attaches an
object checks after the forward that some other code has taken it: its loss is an error, not a dense batch. No other
module of fa2patch puts an attribute on a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .._types import Model
from ..errors import PackingNotIsolated

MASK = "mask"
"""On ``position_ids``: the :class:`PackedMask` that an outer model found, or None for a dense batch."""

DOCUMENTS = "documents"
"""On ``position_ids``: the :class:`Boundaries`, for modules that must compute each document separately."""

POOLED = "pooled"
"""On ``input_ids`` or ``inputs_embeds``: the packed batch, for a head that pools documents."""

POSITIONS = "positions"
"""On ``input_ids`` or ``inputs_embeds``: the position ids, for embeddings that take none."""

PADDING = "padding"
"""On ``position_ids``: that the row was a padded batch, so that models around this one see padded hidden states."""

GIVEN = "given"
"""On labels of a Trainer's batch: those that it was given, before some of them were ignored."""

EMBEDDED = "embedded"
"""On ``input_ids``: the :class:`Boundaries` and the shape of the batch, for noise on the embeddings."""

_ATTRIBUTE = "_fa2patch"


@dataclass(eq=False)
class Piece:
    """One object that rides on a tensor.

    Attributes:
        kind: the key of the object, such as :data:`MASK`, :data:`DOCUMENTS` or :data:`POOLED`.
        content: the object itself.
        delivered: whether some code has taken it.
    """

    kind: str
    content: Any
    delivered: bool = False


def attach(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Return a view of the tensor that carries the piece, and every piece that the tensor carries already."""
    carrying = tensor.view_as(tensor)
    setattr(carrying, _ATTRIBUTE, {**getattr(tensor, _ATTRIBUTE, {}), piece.kind: piece})
    return carrying


def find(tensor: object, kind: str) -> Piece | None:
    """Return the piece of this kind that rides on a tensor, or None. The piece is not marked as delivered."""
    carried: dict[str, Piece] | None = getattr(tensor, _ATTRIBUTE, None)
    return None if carried is None else carried.get(kind)


def take(tensor: object, kind: str) -> Any:
    """Return the content of the piece of this kind and mark it as delivered; None if there is no such piece."""
    piece = find(tensor, kind)
    if piece is None:
        return None
    piece.delivered = True
    return piece.content


def require_delivered(piece: Piece | None, model: Model) -> None:
    """Raise :class:`PackingNotIsolated` if no code took the piece during the model's forward."""
    if piece is None or piece.delivered:
        return
    tensor = "input ids" if piece.kind in (POOLED, POSITIONS, EMBEDDED) else "position_ids"
    raise PackingNotIsolated(
        f"{type(model).__name__} found this batch packed and handed its documents on with the {tensor}, but they did "
        f"not arrive where they are needed: something inside the model copies the {tensor} or makes others (a hook, "
        "offloading, upstream's merge of pictures into the row). Hand it tensors as they are, remove the hook, or "
        "train this model padded."
    )
