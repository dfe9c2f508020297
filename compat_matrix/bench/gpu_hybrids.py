"""Hybrids with the kernels of flash-linear-attention and mamba-ssm: --out FILE. ``first_gpu`` starts it.

For each model: the points that models are held to on a GPU, and a packed row's time beside its documents' one by one.
Without a package its models are recorded as missing.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from ..check import gpu
from . import about, mixers

FAMILIES = {
    "fla": ("qwen3_next",),
    "mamba_ssm": ("mamba2", "bamba", "jamba", "falcon_h1"),
    "causal_conv1d": ("lfm2",),
}
"""The hybrids whose mixers take their kernels from a package, by the package's import name."""

TOY = {"fla": ("qwen3_next",)}
REPEATS = 9


def main(arguments: list[str] | None = None) -> int:
    """Measure the models that the file does not have; returns 3 if time ran out before the last."""
    parser = argparse.ArgumentParser(prog="python -m compat_matrix.bench.gpu_hybrids", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=60, help="start no model later")
    parser.add_argument("--toy", action="store_true", help="one model in pure torch too, only to see that it runs")
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    until = time.monotonic() + given.seconds
    found: dict[str, Any] = {**about.header("", given.device), "missing": {}, "families": {}}
    if given.out.exists():
        found["families"] = about.read(given.out)["families"]
    for package, families in (TOY if given.toy else FAMILIES).items():
        why = lacking(package)
        if why:
            found["missing"][package] = why
        for family in families if given.toy or not why else ():
            if family in found["families"]:
                continue
            if time.monotonic() > until:
                return 3
            found["families"][family] = measured(family, given.device, given.toy)
            about.write(given.out, found)
    about.write(given.out, found)
    return 0


def lacking(package: str) -> str:
    """Return why a package cannot be used; empty if it can. Builds for another torch fail when they are imported."""
    try:
        importlib.import_module(package)
    except Exception as error:  # a broken build raises errors of many types
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def measured(family: str, device: str, toy: bool) -> dict[str, Any]:
    """Return the points and the times of a model."""
    lengths = mixers.QUICK if toy else mixers.LENGTHS
    points = gpu.evidence([family], device, "reference" if device == "cpu" else "auto")["architectures"]
    found: dict[str, Any] = {"points": points.get(family, "this Transformers has no such model"), "rows": {}}
    sizes = {**gpu.BIG, **mixers.SIZES}
    for name, documents in lengths.items() if points else ():
        try:
            made = mixers.compared(family, documents, 1 if toy else REPEATS, device, torch.bfloat16, sizes)
        except Exception as error:  # kernels raise errors of many types
            made = {"error": f"{type(error).__name__}: {error}"[:300]}
        found["rows"][name] = made
    return found


if __name__ == "__main__":
    sys.exit(main())
