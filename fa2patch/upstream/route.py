"""How the boundaries reach the layers of one model."""

from __future__ import annotations

from typing import NamedTuple

from . import inspecting
from .find_mixers import carrier
from .looked import Looked
from .packed_mask import MASK
from .traits import masks


class Route(NamedTuple):
    """How the boundaries pass through the forwards of one model.

    Attributes:
        carrier: the forward argument that is replaced by the :class:`PackedMask`.
        stops_ids: whether the decoder takes no ``position_ids`` (Mamba, RWKV, OPT up to 4.45).
        makes_masks: whether the outermost model makes masks for the models inside it (Gemma 3 up to 4.52).
    """

    carrier: str
    stops_ids: bool
    makes_masks: bool


def route_of(model: Looked) -> Route:
    """Return how the boundaries pass through a model."""
    made_by = [site.owner for inner in model.entered for site in masks.sites(type(inner))]
    return Route(
        MASK if model.attention else carrier(model.decoder, model.mixers),
        "position_ids" not in inspecting.upstream_parameters(type(model.decoder).forward),
        len(model.entered) > 1 and any(isinstance(cls, type) and isinstance(model.model, cls) for cls in made_by),
    )
