"""All traits, in the order in which a model is asked for them and a forward runs them.

Refusals stand first: the first trait that refuses a model decides what its user is told. A new trait is one file in
this folder and one line here. :func:`register_trait` adds a user's own.
"""

from __future__ import annotations

from ...errors import BadArgument
from .attention import AttentionLayers, BrokenFlashClass, FusedFlash, UnclaimedFlash
from .axes import Axes
from .cache import NoCache
from .directions import Directions
from .encoders import CrossAttention, EncoderDecoder
from .first_labels import FirstLabels
from .masks import Masks
from .mixers import Mixers
from .pooler_output import PoolerOutput
from .pooling import PooledHeads
from .positions import Positions
from .registry import Registered
from .rope import Rope
from .row_heads import FirstTokenHeads, RowHeads
from .row_values import RowValues
from .scaled_embeddings import ScaledEmbeddings
from .trait import Trait
from .unreadable import Unreadable

TRAITS: tuple[Trait, ...] = (
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
    FusedFlash(),
    UnclaimedFlash(),
    Masks(),
    FirstLabels(),
    RowValues(),
    PooledHeads(),
    Axes(),
    ScaledEmbeddings(),
    Rope(),
    NoCache(),
    PoolerOutput(),
)

_registered: list[Trait] = []


def traits() -> tuple[Trait, ...]:
    """fa2patch's own traits, then those that were registered."""
    return (*TRAITS, *_registered)


def by_name(name: str) -> Trait:
    """The trait of a name that is in ``Patch.found``."""
    return next(trait for trait in traits() if trait.name == name)


def register_trait(trait: Trait) -> None:
    """Add a trait, for all models that are patched from now on. One of the same name is replaced.

    Args:
        trait: an instance of a subclass of :class:`Trait`, with a name that none of fa2patch's own has.

    Raises:
        BadArgument: it is no trait, or its name is taken.
    """
    if not isinstance(trait, Trait) or not isinstance(getattr(trait, "name", None), str):
        raise BadArgument(f"register_trait: expected a Trait with a name, found {trait!r}.")
    if any(own.name == trait.name for own in TRAITS):
        raise BadArgument(f"register_trait: fa2patch has a trait {trait.name!r} of its own. Choose another name.")
    _registered[:] = [*(other for other in _registered if other.name != trait.name), trait]
