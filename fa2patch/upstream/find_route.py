"""Finds how the boundaries can reach the layers of a model."""

from __future__ import annotations

from . import inspecting
from .find_mixers import carrier
from .looked import Looked
from .packed_mask import MASK
from .route import Route
from .traits import masks


def route_of(model: Looked) -> Route:
    """Return how the boundaries pass through a model."""
    made_by = [site.owner for inner in model.entered for site in masks.sites(type(inner))]
    return Route(
        MASK if model.attention else carrier(model.decoder, model.mixers),
        "position_ids" not in inspecting.upstream_parameters(type(model.decoder).forward),
        len(model.entered) > 1 and any(isinstance(cls, type) and isinstance(model.model, cls) for cls in made_by),
    )
