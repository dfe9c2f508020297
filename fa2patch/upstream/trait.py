"""The base class of traits, and what they look at: a model with its layers."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from .._types import Model
from .architectures import Architecture
from .facts import Site
from .find_layers import Layer, attention_layers
from .find_mixers import mixer_layers
from .find_models import models
from .step import Step


class ModelLayers:
    """A Transformers model and its layers, which are looked up once, on first access.

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
    def by_document(self) -> bool:
        """Whether the base model computes each document by itself."""
        return any(layer.seam == "document" for layer in self.attention)

    @property
    def apart(self) -> bool:
        """The earlier name of :attr:`by_document`."""
        warnings.warn("ModelLayers.apart is called by_document.", FutureWarning, stacklevel=2)
        return self.by_document

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Every layer that must be given the boundaries."""
        return (*self.attention, *self.mixers)

    def __str__(self) -> str:
        return type(self.model).__name__


class Trait:
    """One feature that some models have and packed rows touch.

    ``apply`` asks each trait whether the model has it, whether the model must be refused, and which attributes must be
    replaced. Every forward of a patched model then calls :meth:`before` and :meth:`after` of those that were found. A
    subclass overrides the methods that it needs.

    Attributes:
        name: the trait's key in ``Patch.found``.
        of_head: whether :meth:`refuses` is about a head that cannot be given packed rows. It is not called if the
            model's padded batches are computed packed, because the head gets padded hidden states then. The trait's
            :meth:`before` must refuse a packed batch that reaches the head all the same.
    """

    name: str
    of_head: bool = False

    def finds(self, model: ModelLayers) -> Any:
        """Look for the trait in a model.

        Returns:
            What was found, or None if the model does not have the trait. It is kept in ``Patch.found``, so it must be
            picklable and must not hold modules or tensors.
        """
        return True

    def refuses(self, model: ModelLayers, found: Any) -> None:
        """Raise an :class:`~fa2patch.errors.Fa2PatchError` if a model with this trait cannot be patched."""

    def replaces(self, model: ModelLayers, found: Any) -> Iterable[Site]:
        """The attributes that must be replaced."""
        return ()

    def before(self, step: Step, found: Any) -> None:
        """Check or change the call before a model's forward. ``step.mask`` is None for a dense batch."""

    def after(self, step: Step, found: Any, output: Any) -> Any:
        """Check or change the output after a model's forward, and return it."""
        return output
