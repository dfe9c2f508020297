"""Public names for writing a trait: one feature of a model that packed rows touch."""

from __future__ import annotations

from typing import Any

from .documents.boundaries import Boundaries
from .patch.model_plan import TRAITS, register_trait, traits
from .upstream import attached
from .upstream.facts import Site, of_forward
from .upstream.find_layers import ModelLayers
from .upstream.step import Step, Trait

__all__ = [
    "TRAITS", "ModelLayers", "Site", "Step", "Trait", "documents_of", "of_forward", "register_trait", "traits",
]  # fmt: skip


def documents_of(position_ids: Any) -> Boundaries | None:
    """Take the boundaries that are attached to ``position_ids`` (see :meth:`Step.send_documents`).

    Returns:
        The boundaries, which then count as delivered. None for a dense batch.
    """
    found: Boundaries | None = attached.take(position_ids, attached.DOCUMENTS)
    return found
