"""Part ``dry``: what every kernel's path dispatches beyond the kernel, traced without a device, by torch version.

The counts are the same on any machine. Versions of torch with the same counts share a row.

FlexAttention's own kernels are not part of it. With torch 2.14.1, Inductor wrote the forward's Triton kernel for fake
CUDA tensors once twelve functions of ``torch.cuda``, ``torch.accelerator`` and Triton's driver had been replaced, and
Triton 3.8 compiled it for compute capability 9.0 without a device: nine kinds of layer with the masks of
:mod:`fa2patch.kernels.flex`, with at most 157,312 of Hopper's 232,448 bytes of shared memory. Its backward could not be
traced, because autograd asks a CUDA tensor's device for its stream. Replacements of so many private functions are not
kept here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.progress import Progress

from .. import environments

TORCH = (
    "2.4.1", "2.5.1", "2.6.0", "2.7.1", "2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0",
)  # fmt: skip
"""The last release of each minor. Each environment takes about 5 GB, unless the package index has a build for CPUs."""

TRANSFORMERS = environments.newest().transformers


def measure(progress: Progress, folder: Path, versions: tuple[str, ...] = TORCH, quick: bool = False) -> Any:
    """Trace in every version's own environment (kept in ``folder``) and process, and return the result of the part.

    Args:
        quick: use this process's own torch alone.
    """
    if quick:
        from . import dry_once

        found = dry_once.everything()
        return {"torch_versions": [found["torch"]], "rows": merged([found])}
    task = progress.add_task("dry", total=len(versions))
    runs = []
    with environments.only_our_packages() as packages:
        for torch in versions:
            python = environments.make(environment(torch), folder.resolve())
            runs.append(environments.printed(python, packages, "compat_matrix.bench.dry_once"))
            progress.update(task, advance=1)
    return {"torch_versions": [run["torch"] for run in runs], "rows": merged(runs)}


def environment(torch: str) -> environments.Version:
    """The environment of a version of torch. Versions up to 2.2 need numpy 1."""
    old = torch.startswith(("2.1.", "2.2."))
    return environments.Version(f"torch-{torch}", TRANSFORMERS, "3.11", torch, pins=("numpy<2",) if old else ())


def merged(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each kernel, case and different result, with the versions of torch that have it.

    The counts of a batch's first layer are those of the newest of these versions.
    """
    rows: dict[str, dict[str, Any]] = {}
    for run in runs:
        for kernel, cases in run["kernels"].items():
            for case, found in cases.items():
                key = json.dumps([kernel, case, _of_each_layer(found)])
                before = rows.get(key, {"torch": []})["torch"]
                rows[key] = {"kernel": kernel, "case": case, "torch": [*before, run["torch"]], **found}
    return list(rows.values())


def _of_each_layer(found: dict[str, Any]) -> dict[str, Any]:
    ways = {way: found[way] for way in ("forward", "backward") if way in found}
    kept = {way: {name: counts[name] for name in counts if name != "first"} for way, counts in ways.items()}
    return {**kept, "why": found.get("why")}
