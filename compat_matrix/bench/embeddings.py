"""Part ``embeddings``: sentence-transformers' encode and training step, padded and with ``fa2patch.apply(model)``."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from rich.progress import Progress

from .. import environments
from ..ecosystem.stacks import stacks

STACK = "sentence-transformers-6.2.0"


def measure(progress: Progress, folder: Path, quick: bool = False) -> Any:
    """Run ``embeddings_once`` in an environment with sentence-transformers, kept in ``folder``; return its result."""
    python = environments.make(stacks()[STACK].environment, folder.resolve())
    task = progress.add_task("embeddings", total=1)
    with environments.only_our_packages() as packages:
        found = once(python, packages, quick)
    progress.update(task, advance=1)
    return found


def once(python: Path, packages: Path, quick: bool) -> dict[str, Any]:
    """Run ``embeddings_once`` with this Python. It prints its result as JSON in the last line."""
    command = [str(python), "-m", "compat_matrix.bench.embeddings_once", *(["--quick"] if quick else [])]
    given = environments.variables(packages, HF_HUB_OFFLINE="1")
    done = subprocess.run(command, cwd=packages, capture_output=True, text=True, env=given)
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
