"""The public names for a trait of your own: one feature of a model that packed rows touch."""

from __future__ import annotations

from typing import Any

from .documents.boundaries import Boundaries
from .upstream import luggage
from .upstream.looked import Looked
from .upstream.site import Site, of_forward
from .upstream.step import Step
from .upstream.traits.order import TRAITS, register_trait, traits
from .upstream.traits.trait import Trait

__all__ = [
    "TRAITS", "Looked", "Site", "Step", "Trait", "documents_of", "of_forward", "register_trait", "traits",
]  # fmt: skip


def documents_of(position_ids: Any) -> Boundaries | None:
    """The documents that ride on ``position_ids`` (see :meth:`Step.send_documents`); None for a dense batch."""
    found: Boundaries | None = luggage.take(position_ids, luggage.DOCUMENTS)
    return found
