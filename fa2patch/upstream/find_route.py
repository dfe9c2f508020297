"""Finds how the boundaries can reach the layers of a model."""

from __future__ import annotations

from collections.abc import Iterable

from . import find_masks, inspecting, masks
from .facts import Site
from .find_mixers import carrier
from .packed_mask import MASK
from .step import Route
from .trait import Looked


def route_of(model: Looked, sites: Iterable[Site]) -> Route:
    """How the boundaries can reach the layers of a model.

    Args:
        model: the model.
        sites: what is replaced for it.
    """
    outermost = type(model.model)
    methods = [site for site in sites if site.make is masks.let_through and site.owner in outermost.__mro__]
    return Route(
        MASK if model.attention else carrier(model.decoder, model.mixers),
        "position_ids" not in inspecting.upstream_parameters(type(model.decoder).forward),
        len(model.entered) > 1 and any(find_masks.calls(outermost, site.attribute) for site in methods),
        model.apart,
    )
