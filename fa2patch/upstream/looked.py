"""A model and its parts, which the traits inspect in ``apply``."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from .._types import Model
from .architectures import Architecture
from .find_layers import Layer, attention_layers
from .find_mixers import mixer_layers
from .find_models import models


class Looked:
    """A Transformers model and its parts. Layers are looked up once, on first access.

    Args:
        model: the Transformers model.
        architecture: its row of the registry.
        vouched: whether the row is registered for the model type, or was named in ``apply``.

    Attributes:
        entered: the models whose ``forward`` a call goes through, the outermost first.
        decoder: the innermost of them, which loops over the layers.
    """

    def __init__(self, model: Model, architecture: Architecture, vouched: bool) -> None:
        self.model, self.architecture, self.vouched = model, architecture, vouched
        self.entered: tuple[Any, ...] = tuple(models(model))
        self.decoder: Model = self.entered[-1]

    @cached_property
    def attention(self) -> tuple[Layer, ...]:
        """The attention layers that offer a seam."""
        return tuple(attention_layers(self.decoder))

    @cached_property
    def mixers(self) -> tuple[Layer, ...]:
        """The mixers that can be given the boundaries, or the layers around them."""
        return tuple(mixer_layers(self.decoder, self.attention))

    @property
    def apart(self) -> bool:
        """Whether the base model computes each document by itself."""
        return any(layer.seam == "document" for layer in self.attention)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Every layer that must be given the boundaries."""
        return (*self.attention, *self.mixers)

    def __str__(self) -> str:
        return type(self.model).__name__
