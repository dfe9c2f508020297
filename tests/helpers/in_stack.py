"""Run a script in the environment of one of the ecosystem's stacks."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compat_matrix import environments
from compat_matrix.ecosystem.stacks import stacks

ROOT = Path(__file__).parents[2]


def run_in(stack: str, script: Path, *arguments: str, **variables: str) -> dict[str, Any]:
    # The script prints a JSON object as its last line.
    return printed_in(stack, str(script), *arguments, **variables)[0]


def printed_in(
    stack: str, *arguments: str, packages: Sequence[str] = (), **variables: str
) -> tuple[dict[str, Any], list[str]]:
    # Returns the JSON object on the last line, and the lines of fa2patch. ``packages`` are added to the stack's pins.
    # The environment is made in ``.compat`` on first use. fa2patch and compat_matrix of this clone can be imported in
    # it.
    wanted = stacks()[stack]
    python = environments.make(wanted.environment.changed(packages), ROOT / ".compat")
    with environments.only_our_packages() as ours:
        path = os.pathsep.join((str(ours), str(ROOT / "tests" / "helpers")))
        given = {**os.environ, **wanted.variables, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **variables}
        done = subprocess.run([str(python), *arguments], env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found, [line for line in done.stderr.splitlines() if line.startswith("fa2patch:")]
