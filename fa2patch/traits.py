"""Public names for writing a trait: one feature of a model that packed rows touch."""

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
    """Take the boundaries that are attached to ``position_ids`` (see :meth:`Step.send_documents`).

    Returns:
        The boundaries, which then count as delivered. None for a dense batch.
    """
    found: Boundaries | None = luggage.take(position_ids, luggage.DOCUMENTS)
    return found
