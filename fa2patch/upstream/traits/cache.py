"""The cache: training does not need one, and its entries do not belong to a single document."""

from __future__ import annotations

from typing import Any

from ..looked import Looked
from ..step import Step
from .trait import Trait

NAME = "cache"
"""The trait's name, a key of ``Patch.found`` if packed batches are computed without a cache."""


class NoCache(Trait):
    """A packed batch is computed with ``use_cache=False``.

    Gemma 3n keeps its cache: its later layers read the keys and values of earlier layers from it.
    """

    name = NAME

    def finds(self, model: Looked) -> bool | None:
        return None if getattr(model.decoder.config, "num_kv_shared_layers", 0) else True

    def before(self, step: Step, found: Any) -> None:
        # a model around the innermost one may not take use_cache (Qwen3.5 in 5.10)
        if (step.places or step.handed) and ("use_cache" in step.calls.names or "use_cache" in step.call):
            step.call["use_cache"] = False
