"""Mixers: layers other than attention that carry state along the row. They compute each document by itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...errors import UnsupportedModel
from ..find_mixers import mixers
from ..looked import Looked
from ..site import Site
from .trait import Trait

NAME = "mixers"
"""The trait's name, a key of ``Patch.found`` if the model has mixers."""


class Mixers(Trait):
    """Replace every mixer or the layer around it, and refuse a model with a mixer that cannot be given boundaries."""

    name = NAME

    def finds(self, model: Looked) -> dict[str, str] | None:
        """The mixers that cannot be given the boundaries, by name; None if the model has no mixers at all."""
        carrying = {} if model.apart else mixers(model.decoder, model.attention)
        covered = tuple(f"{layer.name}." for layer in model.mixers)
        left = {name: what for name, what in carrying.items() if not f"{name}.".startswith(covered)}
        return left if carrying else None

    def refuses(self, model: Looked, found: dict[str, str]) -> None:
        if found:
            (name, what), *others = found.items()
            raise UnsupportedModel(
                f"{type(model.decoder).__name__} carries state along the row outside attention, in {what} at {name}"
                f"{f' and {len(others)} more places' if others else ''}. Nothing that it is handed could tell it where "
                "documents start, so they would leak there. Nothing was patched. Train this model padded."
            )

    def replaces(self, model: Looked, found: Any) -> Iterable[Site]:
        return [layer.site for layer in model.mixers]
