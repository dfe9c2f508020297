"""What is found of one architecture in this environment: with fa2patch, and by Transformers alone."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import Any

IMPLEMENTATIONS = {"without": ("sdpa", "eager"), "with": ("flash_attention_2",)}
"""What is checked without flash-attn, and with (its stand-in on a CPU)."""

ONCE = (
    "generation", "reverted", "host_reads", "rope_scaling", "checkpointing", "autocast", "lora", "windows", "inertness",
    "half_precision", "no_dense_mask",
)  # fmt: skip
"""Run with one implementation where an attention layer's forward is the same for all (the interface seam)."""

OF_SEEDS = ("autocast", "lora", "half_precision", "rope_scaling", "host_reads")
"""There, run for the first fourteen families only: what they turn on lies in what all architectures share."""

NO_SUCH_IMPLEMENTATION = (
    "scaled_dot_product",
    "does not support Flash Attention",
    "FlashAttention cannot",
    "FlashAttention4",
    "does not support the specified flash attention",
    "kernels` is",
)
"""In the errors with which a version says that an architecture has no such attention."""

REFUSED_AND_PATCHED = "refused with one attn_implementation, patched with another"
"""Of an architecture that is one or the other: which of them it is would turn on how somebody loaded it."""


def cell(architecture: str, implementations: tuple[str, ...], points: list[str]) -> dict[str, Any]:
    """What is found of one architecture: with fa2patch and by upstream alone, or why it is refused."""
    import fa2patch

    from .. import tiny_models
    from . import upstream
    from .cell import Cell

    loaded = {}
    unloadable = {}
    for implementation in implementations:
        if implementation == "eager" and loaded and architecture not in tiny_models.SEEDS and _interface(loaded):
            continue
        try:
            loaded[implementation] = Cell(architecture, implementation), tiny_models.build(architecture, implementation)
        except Exception as error:
            unloadable[implementation] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    result: dict[str, Any] = {"fa2patch": {}, "upstream": {}}
    for implementation, reason in unloadable.items():
        if not any(clue in reason for clue in NO_SUCH_IMPLEMENTATION):
            return {"error": f"{implementation}: {reason}"}
        result["fa2patch"][implementation] = {"n/a": {"load": reason}}
    for implementation, (cell, model) in loaded.items():
        result["upstream"][implementation] = upstream.outcomes(cell)
        try:
            with fa2patch.apply(model) as patch:
                result["seam"] = sorted({layer.seam for layer in patch.layers})
        except (fa2patch.errors.UnsupportedModel, fa2patch.errors.LayerNotPatchable) as error:
            result["refused"] = f"{type(error).__name__}: {error}"
            continue
        except Exception as error:
            return {**result, "error": f"{implementation}: {type(error).__name__}: {error}"[:400]}
        skipped = _skipped(cell, result["seam"], first=implementation == next(iter(loaded)))
        result["fa2patch"][implementation] = _results(cell, points, skipped)
    if "refused" not in result:
        return result
    if "seam" in result:
        return {**result, "error": f"{REFUSED_AND_PATCHED}: {result['refused']}"[:400]}
    del result["fa2patch"]
    return result


def _interface(loaded: dict[str, Any]) -> bool:
    """Whether eager is the same code but for the function that is looked up."""
    from fa2patch.upstream.find_layers import attention_layers
    from fa2patch.upstream.find_models import models

    model = next(iter(loaded.values()))[1]
    return all(layer.seam == "interface" for layer in attention_layers(models(model)[-1]))


def _skipped(cell: Any, seam: list[str], first: bool) -> dict[str, str]:
    """Points that are not run, and why."""
    from .. import tiny_models

    if {*seam} - {"mixer"} != {"interface"} or cell.family.endswith(".json"):
        return {}
    again = not first or cell.implementation == "flash_attention_2"
    skipped = dict.fromkeys(ONCE if again else (), "run with sdpa, or eager")
    if cell.family not in tiny_models.SEEDS:
        skipped.update(dict.fromkeys(OF_SEEDS, "run for the first fourteen families"))
    return skipped


def _results(cell: Any, points: list[str], skipped: dict[str, str]) -> dict[str, Any]:
    import torch

    from .cell import NotApplicable
    from .points import POINTS

    counts: dict[str, Any] = {"ok": 0, "n/a": {}, "fail": {}}
    for name in points:
        if name in skipped:
            counts["n/a"][name] = skipped[name]
            continue
        try:
            torch.manual_seed(0)
            POINTS[name](cell)
            counts["ok"] += 1
        except NotApplicable as reason:
            counts["n/a"][name] = str(reason)
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})"
            counts["fail"][name] = what[:400]
            if os.environ.get("FA2PATCH_TRACE"):
                traceback.print_exc()
    return counts
