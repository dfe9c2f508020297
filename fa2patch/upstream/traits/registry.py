"""The registry's row of a model: what cannot be found by looking."""

from __future__ import annotations

from ...errors import UnsupportedModel
from ..architectures import Architecture, row_of
from ..looked import Looked
from .trait import Trait

NAME = "registry"
"""The trait's name, under which the row is in ``Patch.found``."""


class Registered(Trait):
    """A row may refuse a config. Its quirks are applied to every call of an attention layer."""

    name = NAME

    def finds(self, model: Looked) -> Architecture:
        return model.architecture

    def refuses(self, model: Looked, found: Architecture) -> None:
        config = model.model.config
        for row, of in ((found, model.decoder.config), (row_of(config), config)):
            reason = row.refuse(of) if row.refuse is not None else None
            if reason:
                raise UnsupportedModel(f"{model} cannot be trained packed: {reason}.")
