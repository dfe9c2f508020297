"""Part ``packing``: planners of rows on the same lengths, fa2patch's beside TRL's and axolotl's newest."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.progress import Progress

from .. import environments

PEERS = ("accelerate", "datasets", "numba", "trl")
ALONE = "axolotl"
"""Installed without what it depends on, which pins another Transformers: its sampler needs of that only numba."""


def measure(progress: Progress, folder: Path, quick: bool = False) -> Any:
    """Everything runs in one process, in an environment that has the peers (kept in ``folder``)."""
    with environments.only_our_packages() as packages:
        return once(progress, environment(folder.resolve()), packages, quick)


def environment(folder: Path) -> Path:
    """The Python that has the peers' newest releases, as of when it was made."""
    newest = [block for block in environments.versions().values() if block.name == block.transformers][-1]
    python = environments.make(replace(newest, name="packing", pins=(*newest.pins, *PEERS)), folder)
    found = f"import importlib.metadata as installed; installed.version({ALONE!r})"
    if subprocess.run([str(python), "-c", found], capture_output=True).returncode:
        environments._uv("pip", "install", "--python", str(python), "--no-deps", ALONE)
    return python


def once(progress: Progress, python: Path, packages: Path, quick: bool) -> dict[str, Any]:
    """The child prints its versions and how many cases there are, then a case a line."""
    given = {"PYTHONPATH": str(packages), "PYTHONNOUSERSITE": "1", "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    command = [str(python), "-m", "compat_matrix.bench.packing_once", *(["--quick"] if quick else [])]
    with subprocess.Popen(
        command, cwd=packages, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **given}
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        lines = (json.loads(line) for line in child.stdout if line.startswith("{"))
        found = next(lines, {})
        task = progress.add_task("packing", total=found.pop("total", None))
        cases = []
        for case in lines:
            cases.append(case)
            progress.update(task, advance=1)
        said = child.stderr.read()
    if child.returncode:
        raise RuntimeError(said[-1500:])
    return {**found, "cases": cases}
