"""Rope scaling that depends on the sequence length: find it in a config, and compute it for each document."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .._types import Config
from ..documents.trees import Tree
from ..errors import PackingNotIsolated

MODULES = ("rotary_emb", "maybe_rotary")  # names of rotary modules


@dataclass(frozen=True)
class LengthScaled:
    """A rope scaling that depends on the sequence length."""

    kind: str  # "dynamic" or "longrope"
    limit: int  # the length in tokens up to which the scaling does not depend on it

    def check(self, positions: int, tree: Tree | None, split: bool) -> None:
        # `positions` is the largest position id + 1 of the whole rows, and `split` says whether these are split over
        # processes.
        if self.kind == "dynamic" and positions > self.limit:
            raise PackingNotIsolated(
                f"rope scaling 'dynamic' stretches positions by the longest sequence, so documents of one row would "
                f"share it: the longest here reaches position {positions}, beyond the {self.limit} of "
                "max_position_embeddings. Truncate documents to that, use another rope scaling, or train padded."
            )
        if self.kind == "longrope" and positions > self.limit and split:
            raise PackingNotIsolated(
                f"rope scaling 'longrope' has other factors for documents longer than {self.limit} tokens, the longest "
                f"here has {positions}, and its row is split over processes, which do not know how long a document is "
                "where they compute positions. Truncate documents, or train with whole rows."
            )
        if self.kind != "longrope" or tree is None:
            return
        long: dict[int, bool] = {}  # by the root of a sequence, whether it is longer than the limit
        for leaf in tree.leaves:
            is_long = tree.offsets[leaf] + tree.lengths[leaf] > self.limit
            if long.setdefault(tree.path(leaf)[0], is_long) is not is_long:
                raise PackingNotIsolated(
                    f"rope scaling 'longrope' has other factors for sequences longer than {self.limit} tokens, and of "
                    "the sequences that share a prompt some are longer and some are not: the prompt would be needed "
                    "twice. Give such sequences as documents of their own."
                )


def length_scaled(config: Config) -> LengthScaled | None:
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
