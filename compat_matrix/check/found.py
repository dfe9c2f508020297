"""Checks one architecture in this environment, with fa2patch and with Transformers alone."""

from __future__ import annotations

import os
import platform
import time
import traceback
from dataclasses import replace
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, Callable

# what is checked without flash-attn and with it, which is its stand-in on a CPU
IMPLEMENTATIONS = {"without": ("sdpa", "eager"), "with": ("flash_attention_2",)}

# These points are run with one implementation only if all implementations share one forward (the interface seam).
# inertness and generation are not among them, because a model's masks differ with the implementation.
ONCE = (
    "reverted", "host_reads", "rope_scaling", "checkpointing", "autocast", "lora", "windows", "half_precision",
    "no_dense_mask", "shared_prompts_checkpointed",
)  # fmt: skip

# These points are run for an architecture for which another one vouches, since all its layers are at the interface seam
# and apply finds the same in both (compat_matrix.plans). The seam gets q, k and v from the modeling file. What comes
# after it does not depend on the architecture.
OF_EVERY_ARCHITECTURE = ("packed_row", "nothing_crosses", "refusals", "generation", "packed_row_with_a_cache")

VOUCHED = "vouched for by "  # begins the reason of a point that is not run; the architecture that vouches follows

# The line of this name tells, behind the plans, what was executed for all of them.
EXECUTED = "what was executed"

# Transformers raises errors with these parts if an architecture does not have an implementation.
NO_SUCH_IMPLEMENTATION = (
    "scaled_dot_product", "does not support Flash Attention", "FlashAttention cannot", "FlashAttention4",
    "does not support the specified flash attention", "kernels` is", "KeyError: 'flash_attention_2'",
)  # fmt: skip

# The points under this key compare with what Transformers alone cannot compute. Each has its error.
ALONE = "alone"

# The reason of a point that is not run on rows with pictures or sound, or on pairs
ON_TEXT = "checked on rows of text"

# It stands for all points of an implementation with which Transformers alone fails on one document.
DOCUMENT = "document"

# The support of such an architecture depends on the implementation that it is loaded with.
REFUSED_AND_PATCHED = "refused with one attn_implementation, patched with another"


def header(flash_attn: str | None, device: str, kernel: str, points: list[str], rows: list[str]) -> dict[str, Any]:
    import transformers

    return {
        "transformers": transformers.__version__, "python": platform.python_version(),
        "wrapt": metadata.version("wrapt"), "flash_attn": flash_attn, "device": device, "kernel": kernel,
        "points": points, "upstream_rows": rows,
    }  # fmt: skip


def timed(check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    import torch

    when, started = datetime.now(timezone.utc), time.process_time()
    made = check()
    seconds = round(time.process_time() - started, 1)
    about = {"torch": torch.__version__, "when": when.isoformat(timespec="seconds"), "seconds": seconds}
    return {**made, "made": about}


def cell(architecture: str, implementations: tuple[str, ...], points: list[str], voucher: str = "") -> dict[str, Any]:
    # The findings are as the evidence has them: "fa2patch" and "upstream" by implementation and the "seam", or why the
    # architecture is "refused", or an "error".
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
            result["refused"] = f"{type(error).__name__}: {error.message}"
            continue
        except Exception as error:
            reason = f"{implementation}: {type(error).__name__}: {fa2patch.errors.message(error)}"
            return {**result, "error": reason[:400]}
        if tiny_models.has_media(architecture):
            try:
                fa2patch.DataCollatorForMultimodalFlattening(model)
            except fa2patch.errors.CollatorError as error:
                result["refused"] = f"{type(error).__name__}: {error.message}"
                del result["seam"]
                continue
        other = side(architecture)
        failure = other.failure_alone(cell) if other else ""
        if failure:
            result["fa2patch"][implementation] = {ALONE: {DOCUMENT: failure}}
            continue
        skipped = _skipped(cell, result["seam"], first=implementation == next(iter(loaded)))
        if voucher:
            skipped.update({name: VOUCHED + voucher for name in points if name not in OF_EVERY_ARCHITECTURE})
        result["fa2patch"][implementation] = _results(cell, points, skipped)
    if "refused" not in result:
        return result
    if "seam" in result:
        return {**result, "error": f"{REFUSED_AND_PATCHED}: {result['refused']}"[:400]}
    del result["fa2patch"]
    return result


def side(architecture: str) -> Any:
    """The module with the points of an architecture that reads more than a row of text, else None."""
    from .. import tiny_models
    from .points import media, pairs

    if tiny_models.has_pairs(architecture):
        return pairs
    return media if tiny_models.has_media(architecture) else None


def _interface(loaded: dict[str, Any]) -> bool:
    # At the interface seam, eager differs only in the function that is looked up.
    import fa2patch
    from fa2patch.upstream.find_layers import ModelLayers
    from fa2patch.upstream.find_models import stacks_of

    model = next(iter(loaded.values()))[1]
    if stacks_of(model) is None:
        return all(layer.seam == "interface" for layer in ModelLayers(model).attention)
    try:
        with fa2patch.apply(model) as patch:
            return all(layer.seam == "interface" for layer in patch.layers)
    except Exception:  # a refusal may differ, too
        return False


def _skipped(cell: Any, seam: list[str], first: bool) -> dict[str, str]:
    from .. import tiny_models

    of_interface = {*seam} - {"mixer"} == {"interface"}
    if not of_interface or tiny_models.has_media(cell.family) or cell.family.endswith(".json"):
        return {}
    again = not first or cell.implementation == "flash_attention_2"
    return dict.fromkeys(ONCE if again else (), "run with sdpa, or eager")


# A point that a float32 model misses by at most so many tolerances may be float32's rounding.
ROUNDING = 10


def held(point: Callable[[Any], None], cell: Any) -> str:
    # A point that float32 misses narrowly must hold in float64, with the same tolerance. Rounding depends on the
    # processor, and some mixtures' float32 gradients of documents alone are further from float64 than the tolerance.
    # What is computed wrong is wrong in float64, too. By how much float32 missed is returned, or an empty text.
    import torch

    from .compare import TooFar

    torch.manual_seed(0)
    try:
        point(cell)
        return ""
    except TooFar as far:
        if cell.dtype == torch.float64 or not far.error <= ROUNDING * far.tolerance:
            raise
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)  # 4.36's masks are made in it
        try:
            torch.manual_seed(0)
            point(replace(cell, in_double=True))
        except Exception:
            raise far from None
        finally:
            torch.set_default_dtype(default)
        return str(far)


def _results(cell: Any, points: list[str], skipped: dict[str, str]) -> dict[str, Any]:
    from fa2patch.errors import message

    from .cell import AloneFails, NotApplicable
    from .points import POINTS

    other = side(cell.family)
    run = other.POINTS if other else POINTS
    counts: dict[str, Any] = {"ok": 0, "n/a": {}, "fail": {}}
    for name in points:
        if name not in run:
            counts["n/a"][name] = ON_TEXT
            continue
        if name in skipped:
            counts["n/a"][name] = skipped[name]
            continue
        try:
            rounding = held(run[name], cell)
            counts["ok"] += 1
            if rounding:
                counts.setdefault("in_double", {})[name] = rounding
        except NotApplicable as reason:
            counts["n/a"][name] = str(reason) or ON_TEXT
        except AloneFails as reason:
            counts.setdefault(ALONE, {})[name] = str(reason)
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__}: {message(error)} ({Path(frame.filename).name}:{frame.lineno})"
            counts["fail"][name] = what[:400]
            if os.environ.get("FA2PATCH_TRACE"):
                traceback.print_exc()
    return counts
