"""Whether a model's rope scaling depends on the length of the sequence, read off its config."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple

import torch

from ..documents.boundaries import Boundaries
from ..errors import PackingNotIsolated

NAME = "rope"
"""The trait's name, under which :class:`Found` is in ``Patch.found``."""

MODULES = ("rotary_emb", "maybe_rotary")
"""Names of rotary modules."""


@dataclass(frozen=True)
class LengthScaled:
    """A rope scaling that depends on the length. ``limit``: tokens up to which it doesn't."""

    kind: str
    limit: int

    def check(self, positions: int) -> None:
        """Raise :class:`PackingNotIsolated` for a document of a length that cannot be scaled on its own."""
        if self.kind == "dynamic" and positions > self.limit:
            raise PackingNotIsolated(
                f"rope scaling 'dynamic' stretches positions by the longest sequence, so documents of one row would "
                f"share it: the longest here reaches position {positions}, beyond the {self.limit} of "
                "max_position_embeddings. Truncate documents to that, use another rope scaling, or train padded."
            )


class Found(NamedTuple):
    """What is known of a model's rope.

    Attributes:
        scaling: the scaling that depends on the length.
        rides: whether the documents must ride on ``position_ids`` to the decoder's rotary modules.
    """

    scaling: LengthScaled
    rides: bool


def length_scaled(config: Any) -> LengthScaled | None:
    """The length-dependent rope scaling of a config, if it has one."""
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


def _scalings(config: Any) -> Iterator[dict[str, Any]]:
    for name in ("rope_parameters", "rope_scaling"):
        scaling = getattr(config, name, None)
        if isinstance(scaling, dict):
            yield scaling
            yield from (inner for inner in scaling.values() if isinstance(inner, dict))


def each_document(
    rotary: Callable[..., Any],
    x: torch.Tensor,
    position_ids: torch.Tensor,
    documents: Boundaries,
    kwargs: dict[str, Any],
) -> Any:
    """cos and sin ``[batch, length, dim]`` of ids ``[batch, length]``, computed for each document by itself."""
    rows, length = position_ids.shape
    kwargs = {name: value for name, value in kwargs.items() if name != "seq_len"}
    documents_ids = torch.split(position_ids.reshape(-1), list(documents.lengths))
    pieces = [rotary(x, position_ids=ids[None], **kwargs) for ids in documents_ids]
    return tuple(torch.cat(part, dim=1).view(rows, length, -1) for part in zip(*pieces))
