"""Objects that ride on a tensor from one forward to the next, as attributes of the tensor, one for each kind.

A model's own code passes its position ids (or input ids) down to the modules inside it and has no argument for
boundaries. A copy of the tensor loses the attribute. So whoever attaches an object checks after the forward that some
other code has taken it: its loss is an error, not a dense batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .._types import Model
from ..errors import PackingNotIsolated

# The kinds of pieces. `getattr(tensor, KIND, None)` is the piece of a kind, or None: this is asked so often in each
# forward that no function stands around it. No other module of fa2patch puts an attribute on a tensor.

# on `position_ids`: the PackedMask that an outer model found, or None for a dense batch
MASK = "_fa2patch_mask"

# on `position_ids`: the Boundaries, for modules that must compute each document separately
DOCUMENTS = "_fa2patch_documents"

# on `input_ids` or `inputs_embeds`: the packed batch, for a head that pools documents
POOLED = "_fa2patch_pooled"

# on `input_ids` or `inputs_embeds`: the position ids, for embeddings that take none
POSITIONS = "_fa2patch_positions"

# on `position_ids`: that the row was a padded batch, of so many tokens with its padding; models around this one see
# padded hidden states
PADDING = "_fa2patch_padding"

# on labels of a Trainer's batch: those that it was given, before some of them were ignored
GIVEN = "_fa2patch_given"

# on `input_ids`: the Boundaries and the shape of the batch, for noise on the embeddings
EMBEDDED = "_fa2patch_embedded"

# the kinds that ride on one tensor: on position ids, on tokens, on labels
_TOGETHER = ((MASK, DOCUMENTS, PADDING), (POOLED, POSITIONS, EMBEDDED), (GIVEN,))

_BESIDE = {kind: tuple(each for each in kinds if each != kind) for kinds in _TOGETHER for kind in kinds}


@dataclass(eq=False)
class Piece:
    """One object that rides on a tensor."""

    kind: str  # one of those above
    content: Any
    delivered: bool = False  # whether some code has taken it


def attach(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    carrying = tensor.view_as(tensor)
    setattr(carrying, piece.kind, piece)
    for kind in _BESIDE[piece.kind]:
        riding = getattr(tensor, kind, None)
        if riding is not None:
            setattr(carrying, kind, riding)
    return carrying


def attach_again(whole: torch.Tensor, part: torch.Tensor, contents: dict[str, Any]) -> torch.Tensor:
    # The part carries nothing yet. `contents` holds by kind what it carries in the place of the whole's content.
    for kind in _BESIDE:
        piece: Piece | None = getattr(whole, kind, None)
        if piece is not None:
            piece.delivered = True
            part = attach(part, Piece(kind, contents.get(kind, piece.content)))
    return part


def take(tensor: object, kind: str) -> Any:
    piece: Piece | None = getattr(tensor, kind, None)
    if piece is None:
        return None
    piece.delivered = True
    return piece.content


def require_delivered(piece: Piece | None, model: Model) -> None:
    if piece is None or piece.delivered:
        return
    tensor = "input ids" if piece.kind in (POOLED, POSITIONS, EMBEDDED) else "position_ids"
    raise PackingNotIsolated(
        f"{type(model).__name__} found this batch packed and handed its documents on with the {tensor}, but they did "
        f"not arrive where they are needed: something inside the model copies the {tensor} or makes others (a hook, "
        "offloading, upstream's merge of pictures into the row). Hand it tensors as they are, remove the hook, or "
        "train this model padded."
    )
