"""Part ``startup``: the time of ``import fa2patch`` after torch, and of ``apply`` on a model of 80 layers."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from typing import Any

from rich.progress import Progress

LAYERS, QUICK_LAYERS = 80, 2

_IMPORT = """
import json, sys, time, torch
before, started = set(sys.modules), time.perf_counter()
import fa2patch
seconds = time.perf_counter() - started
print(json.dumps({"seconds": seconds, "packages": sorted({name.split(".")[0] for name in set(sys.modules) - before})}))
"""


def measure(progress: Progress, quick: bool = False, repeats: int = 15) -> Any:
    """Measure imports and ``apply`` and return the result of the part."""
    repeats, layers = (1, QUICK_LAYERS) if quick else (repeats, LAYERS)
    task = progress.add_task("startup", total=2 * repeats)
    imports, seconds = [], []
    for _ in range(repeats):
        done = subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, text=True, check=True)
        imports.append(json.loads(done.stdout))
        progress.update(task, advance=1)
    for _ in range(repeats):
        seconds.append(applied(layers))
        progress.update(task, advance=1)
    known = set(sys.stdlib_module_names) if sys.version_info >= (3, 10) else set()
    packages = sorted({name for found in imports for name in found["packages"]} - known)
    return {
        "repeats": repeats,
        "layers": layers,
        "import": _milliseconds([found["seconds"] for found in imports]),
        "imported": packages,
        "apply": _milliseconds(seconds),
    }


def applied(layers: int) -> float:
    """Return the seconds of ``fa2patch.apply`` on a Llama on the meta device; the patch is reverted afterwards."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import fa2patch

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers))
    started = time.perf_counter()
    patch = fa2patch.apply(model)
    taken = time.perf_counter() - started
    patch.revert()
    return taken


def _milliseconds(seconds: list[float]) -> dict[str, float]:
    return {"min_ms": round(1e3 * min(seconds), 1), "median_ms": round(1e3 * statistics.median(seconds), 1)}
