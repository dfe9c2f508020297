"""Part ``packing``: fa2patch's planners of rows and those of the newest TRL and axolotl, on the same lengths."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.progress import Progress

from .. import environments

PEERS = ("accelerate", "datasets", "numba", "trl")
ALONE = "axolotl"
"""Installed without its dependencies, which pin another Transformers. Its sampler needs only numba."""


def measure(progress: Progress, folder: Path, quick: bool = False) -> Any:
    """Run all planners in an environment with the other packages (kept in ``folder``) and return the part's result."""
    with environments.only_our_packages() as packages:
        return once(progress, environment(folder.resolve()), packages, quick)


def environment(folder: Path) -> Path:
    """Return the Python of the environment; if it is missing, make it with the packages' newest releases."""
    newest = [block for block in environments.versions().values() if block.name == block.transformers][-1]
    python = environments.make(replace(newest, name="packing", pins=(*newest.pins, *PEERS)), folder)
    found = f"import importlib.metadata as installed; installed.version({ALONE!r})"
    if subprocess.run([str(python), "-c", found], capture_output=True).returncode:
        environments._uv("pip", "install", "--python", str(python), "--no-deps", ALONE)
    return python


def once(progress: Progress, python: Path, packages: Path, quick: bool) -> dict[str, Any]:
    """Run packing_once. It prints a JSON line with versions and the number of cases, then one for each case."""
    given = environments.variables(packages, NUMBA_NUM_THREADS="1")
    command = [str(python), "-m", "compat_matrix.bench.packing_once", *(["--quick"] if quick else [])]
    with subprocess.Popen(
        command, cwd=packages, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=given
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
