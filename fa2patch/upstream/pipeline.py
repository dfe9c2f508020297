"""All traits, in the order in which ``apply`` asks for them and a forward calls ``before`` (``after`` in reverse).

Traits that refuse models come first, because the first refusal is the error that the user sees. A new trait is one
file in this folder and one line here. :func:`register_trait` adds a user's own trait.
"""

from __future__ import annotations

from ..errors import BadArgument
from .directions import Directions
from .embeddings import NoisyEmbeddings, ScaledEmbeddings, TokenTypes
from .heads import FirstTokenHeads, PooledHeads, PoolerOutput, RowHeads, RowValues
from .labels import FirstLabels, RouterLoss, WeightedLoss
from .masks import Masks
from .positions import Axes, Positions, Rope, RowLength, RowPositions
from .refusals import (
    AttentionLayers,
    BrokenFlashClass,
    CrossAttention,
    EncoderDecoder,
    FusedFlash,
    Mixers,
    NoCache,
    NoTokenIds,
    Registered,
    UnclaimedFlash,
    Unreadable,
)
from .trait import Trait

TRAITS: tuple[Trait, ...] = (
    NoTokenIds(),
    EncoderDecoder(),
    FirstTokenHeads(),
    Unreadable(),
    RowHeads(),
    Registered(),
    Mixers(),
    AttentionLayers(),
    CrossAttention(),
    BrokenFlashClass(),
    Directions(),
    Positions(),
    RowPositions(),
    TokenTypes(),
    FusedFlash(),
    UnclaimedFlash(),
    Masks(),
    WeightedLoss(),
    FirstLabels(),
    RouterLoss(),
    RowValues(),
    PooledHeads(),
    Axes(),
    ScaledEmbeddings(),
    NoisyEmbeddings(),
    Rope(),
    RowLength(),
    NoCache(),
    PoolerOutput(),
)

_registered: list[Trait] = []


def traits() -> tuple[Trait, ...]:
    """The traits of fa2patch, then the registered traits."""
    return (*TRAITS, *_registered)


def by_name(name: str) -> Trait:
    """The trait of this name, a key of ``Patch.found``."""
    return next(trait for trait in traits() if trait.name == name)


def register_trait(trait: Trait) -> None:
    """Add a trait for all models that are patched from now on. A registered trait of the same name is replaced.

    Args:
        trait: an instance of a subclass of :class:`Trait`. Its name must differ from the names of fa2patch's traits.

    Raises:
        BadArgument: ``trait`` is no trait with a name, or fa2patch has a trait of this name.
    """
    if not isinstance(trait, Trait) or not isinstance(getattr(trait, "name", None), str):
        raise BadArgument(f"register_trait: expected a Trait with a name, found {trait!r}.")
    if any(own.name == trait.name for own in TRAITS):
        raise BadArgument(f"register_trait: fa2patch has a trait {trait.name!r} of its own. Choose another name.")
    _registered[:] = [*(other for other in _registered if other.name != trait.name), trait]
