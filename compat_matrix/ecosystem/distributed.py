"""Run scripts of tests/distributed with torchrun, on gloo."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parents[2] / "tests" / "distributed"
LIMIT = 1800
"""Seconds. The longest script runs every architecture, and takes six minutes on a machine with nothing else to do."""


def command(python: Path | str, script: str, *arguments: str, processes: int = 2) -> list[str]:
    """Return the torchrun command of a script (``trainer``, or ``trainer zero3``). torchrun picks a free port."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    return [str(python), *launch, *_called(script), *arguments]


def split(entry: str) -> tuple[str, int]:
    """Return the script of an entry such as ``ulysses, 4 processes``, and its number of processes (2 if not given)."""
    script, _, processes = entry.partition(", ")
    return script, int(processes.split()[0]) if processes else 2


def _called(script: str) -> list[str]:
    file, *options = script.split()
    return [str(SCRIPTS / f"{file}.py"), *options]


def launched(entry: str, python: Path, variables: Mapping[str, str]) -> dict[str, Any]:
    """Run a script, given as ``raw``, ``trainer zero3`` or ``ulysses, 4 processes``.

    It returns the JSON that the script's first process wrote. A ``trainer`` script is first run in one process. The
    result is passed to the second run as the reference.
    """
    begun = time.perf_counter()
    script, processes = split(entry)
    with tempfile.TemporaryDirectory(prefix="fa2patch-") as folder:
        out, reference = Path(folder, "found.json"), Path(folder, "reference.pt")
        # extensions that another release of DeepSpeed has built fail to load
        built = {"TORCH_EXTENSIONS_DIR": str(python.parents[1] / "torch_extensions")}
        beside = {
            **variables,
            **built,
            "TMPDIR": folder,
            "PATH": f"{python.parent}{os.pathsep}{variables.get('PATH', '')}",
        }
        compared = script.startswith("trainer")
        if compared:
            _run([str(python), *_called(script), str(reference)], beside, reference)
        more = [str(reference)] if compared else []
        _run(command(python, script, str(out), *more, processes=processes), beside, out)
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    found["finding"]["seconds"] = round(time.perf_counter() - begun, 1)
    word = "ok" if found["finding"]["ok"] else "FAILED"
    print(f"{entry} {word}, {found['finding']['seconds']:.0f} s", file=sys.stderr, flush=True)
    return found


def _run(launch: list[str], variables: Mapping[str, str], out: Path) -> None:
    """Run a command and check that it wrote its file. After a timeout the whole process group is killed."""
    process = subprocess.Popen(
        launch, env=dict(variables), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        said, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        raise RuntimeError(f"{' '.join(launch[-3:])}: not ready after {LIMIT} s:\n{said[-3000:]}") from None
    if not out.exists():
        raise RuntimeError(f"{' '.join(launch[-3:])} ended with {process.returncode}:\n{said[-3000:]}")
