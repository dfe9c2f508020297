"""Objects that ride on a tensor from one forward to the next, as attributes of the tensor, one for each kind.

A model's own code passes its position ids (or input ids) down to the modules inside it and has no argument for
boundaries, so they are attached to these tensors. A copy of the tensor loses the attribute. So whoever attaches an
object checks after the forward that some other code has taken it: its loss is an error, not a dense batch. No other
module of fa2patch puts an attribute on a tensor. ``getattr(tensor, KIND, None)`` is the piece of a kind, or None; it is
asked so often in each forward that no function stands around it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .._types import Model
from ..errors import PackingNotIsolated

MASK = "_fa2patch_mask"
"""On ``position_ids``: the :class:`PackedMask` that an outer model found, or None for a dense batch."""

DOCUMENTS = "_fa2patch_documents"
"""On ``position_ids``: the :class:`Boundaries`, for modules that must compute each document separately."""

POOLED = "_fa2patch_pooled"
"""On ``input_ids`` or ``inputs_embeds``: the packed batch, for a head that pools documents."""

POSITIONS = "_fa2patch_positions"
"""On ``input_ids`` or ``inputs_embeds``: the position ids, for embeddings that take none."""

PADDING = "_fa2patch_padding"
"""On ``position_ids``: that the row was a padded batch, of so many tokens with its padding. Models around this one see
padded hidden states."""

GIVEN = "_fa2patch_given"
"""On labels of a Trainer's batch: those that it was given, before some of them were ignored."""

EMBEDDED = "_fa2patch_embedded"
"""On ``input_ids``: the :class:`Boundaries` and the shape of the batch, for noise on the embeddings."""

_TOGETHER = ((MASK, DOCUMENTS, PADDING), (POOLED, POSITIONS, EMBEDDED), (GIVEN,))
"""The kinds that ride on one tensor: on position ids, on tokens, on labels."""

_BESIDE = {kind: tuple(each for each in kinds if each != kind) for kinds in _TOGETHER for kind in kinds}


@dataclass(eq=False)
class Piece:
    """One object that rides on a tensor.

    Attributes:
        kind: :data:`MASK`, :data:`DOCUMENTS`, :data:`POOLED` or another kind above.
        content: the object itself.
        delivered: whether some code has taken it.
    """

    kind: str
    content: Any
    delivered: bool = False


def attach(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Return a view of the tensor that carries the piece, and every piece that the tensor carries already."""
    carrying = tensor.view_as(tensor)
    setattr(carrying, piece.kind, piece)
    for kind in _BESIDE[piece.kind]:
        riding = getattr(tensor, kind, None)
        if riding is not None:
            setattr(carrying, kind, riding)
    return carrying


def attach_again(whole: torch.Tensor, part: torch.Tensor, contents: dict[str, Any]) -> torch.Tensor:
    """Return a part of a tensor with the pieces that the whole carries, and count these as taken.

    Args:
        whole: the tensor.
        part: its part, which carries nothing.
        contents: by kind, what the part carries in the place of the whole's content.
    """
    for kind in _BESIDE:
        piece: Piece | None = getattr(whole, kind, None)
        if piece is not None:
            piece.delivered = True
            part = attach(part, Piece(kind, contents.get(kind, piece.content)))
    return part


def take(tensor: object, kind: str) -> Any:
    """Return the content of the piece of this kind and mark it as delivered; None if there is no such piece."""
    piece: Piece | None = getattr(tensor, kind, None)
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
