"""A model's row of the registry, which holds what cannot be found by looking at the model."""

from __future__ import annotations

from ...errors import UnsupportedModel
from ..architectures import NAME, Architecture, row_of
from ..looked import Looked
from .trait import Trait


class Registered(Trait):
    """Refuse a config that the row refuses. The packed mask applies the row's quirks in every attention layer."""

    name = NAME

    def finds(self, model: Looked) -> Architecture:
        return model.architecture

    def refuses(self, model: Looked, found: Architecture) -> None:
        config = model.model.config
        for row, of in ((found, model.decoder.config), (row_of(config), config)):
            reason = row.refuse(of) if row.refuse is not None else None
            if reason:
                raise UnsupportedModel(f"{model} cannot be trained packed: {reason}.")
