"""Part ``embeddings``: sentence-transformers' encode and training step, padded and with ``fa2patch.apply(model)``."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.progress import Progress

from .. import environments
from ..ecosystem.stacks import stacks

STACK = "sentence-transformers-6.2.0"


def measure(progress: Progress, folder: Path, quick: bool = False) -> Any:
    """Run ``embeddings_once`` in an environment with sentence-transformers, kept in ``folder``; return its result."""
    python = environments.make(stacks()[STACK].environment, folder.resolve())
    task = progress.add_task("embeddings", total=None)
    with environments.only_our_packages() as packages:
        return once(python, packages, quick, lambda done, total: progress.update(task, completed=done, total=total))


def once(python: Path, packages: Path, quick: bool, told: Callable[[int, int], None]) -> dict[str, Any]:
    """Run ``embeddings_once`` with this Python.

    It prints a line of JSON after each measurement, ``{"done": ..., "total": ...}``, and its result in the last line.

    Args:
        python: the interpreter.
        packages: the folder that :func:`compat_matrix.environments.only_our_packages` gives.
        quick: only see that it runs.
        told: called with the numbers of measurements that are done, and of all.

    Raises:
        RuntimeError: the process fails. The error ends with what it said.
    """
    command = [str(python), "-m", "compat_matrix.bench.embeddings_once", *(["--quick"] if quick else [])]
    given = environments.variables(packages, HF_HUB_OFFLINE="1")
    found: dict[str, Any] = {}
    with tempfile.TemporaryFile("w+") as said:
        with subprocess.Popen(
            command, cwd=packages, stdout=subprocess.PIPE, stderr=said, text=True, env=given
        ) as process:
            for line in process.stdout or ():
                found = json.loads(line)
                if "total" in found:
                    told(found["done"], found["total"])
        if process.returncode:
            said.seek(0)
            raise RuntimeError(said.read()[-1500:])
    return found
