"""Rope scaling that depends on the sequence length: find it in a config, and compute it for each document."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .._types import Call, Config, Function
from ..documents.boundaries import Boundaries
from ..errors import PackingNotIsolated

NAME = "rope"
"""The trait's name, which is the key of :class:`Found` in ``Patch.found``."""

MODULES = ("rotary_emb", "maybe_rotary")
"""Names of rotary modules."""


@dataclass(frozen=True)
class LengthScaled:
    """A rope scaling that depends on the sequence length.

    Attributes:
        kind: ``"dynamic"`` or ``"longrope"``.
        limit: the length in tokens up to which the scaling does not depend on it.
    """

    kind: str
    limit: int

    def check(self, positions: int) -> None:
        """Raise :class:`PackingNotIsolated` if dynamic scaling would stretch the row's documents together.

        Args:
            positions: largest position id + 1.
        """
        if self.kind == "dynamic" and positions > self.limit:
            raise PackingNotIsolated(
                f"rope scaling 'dynamic' stretches positions by the longest sequence, so documents of one row would "
                f"share it: the longest here reaches position {positions}, beyond the {self.limit} of "
                "max_position_embeddings. Truncate documents to that, use another rope scaling, or train padded."
            )


class Found(NamedTuple):
    """What is known of a model's rope.

    Attributes:
        scaling: the length-dependent scaling.
        rides: whether the documents must ride on ``position_ids`` to the decoder's rotary modules.
    """

    scaling: LengthScaled
    rides: bool


def length_scaled(config: Config) -> LengthScaled | None:
    """Return the length-dependent rope scaling of a config, or None."""
    for scaling in _scalings(config):
        kind = scaling.get("rope_type", scaling.get("type")) or ""
        if "dynamic" in kind:
            return LengthScaled("dynamic", config.max_position_embeddings)
        if kind in ("longrope", "su") or (kind == "yarn" and "short_factor" in scaling):
            limit = (
                getattr(config, "original_max_position_embeddings", None)
                or scaling.get("original_max_position_embeddings")
                or config.max_position_embeddings
            )
            return LengthScaled("longrope", limit)
    return None


def _scalings(config: Config) -> Iterator[dict[str, Any]]:
    for name in ("rope_parameters", "rope_scaling"):
        scaling = getattr(config, name, None)
        if isinstance(scaling, dict):
            yield scaling
            yield from (inner for inner in scaling.values() if isinstance(inner, dict))


def each_document(
    rotary: Function,
    x: torch.Tensor,
    position_ids: torch.Tensor,
    documents: Boundaries,
    kwargs: Call,
) -> Any:
    """Return cos and sin ``[batch, length, dim]``, computed for each document separately.

    Args:
        rotary: the rotary module or its forward.
        x: a tensor that gives ``rotary`` its device and dtype.
        position_ids: ``[batch, length]``.
        documents: the batch's boundaries.
        kwargs: further keywords for ``rotary``. ``seq_len`` is dropped.
    """
    rows, length = position_ids.shape
    kwargs = {name: value for name, value in kwargs.items() if name != "seq_len"}
    documents_ids = torch.split(position_ids.reshape(-1), list(documents.lengths))
    pieces = [rotary(x, position_ids=ids[None], **kwargs) for ids in documents_ids]
    return tuple(torch.cat(part, dim=1).view(rows, length, -1) for part in zip(*pieces))
