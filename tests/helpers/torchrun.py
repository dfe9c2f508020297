"""Run scripts of tests/distributed with torchrun, on gloo."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from compat_matrix.ecosystem.stacks import split

HELPERS = Path(__file__).parent
ROOT = HELPERS.parents[1]
LIMIT = 1800
"""Seconds. The longest script runs every architecture, and takes six minutes on a machine with nothing else to do."""


def variables() -> dict[str, str]:
    """Return the environment variables of a script. In a stack, PYTHONPATH has fa2patch and compat_matrix already."""
    path = os.pathsep.join((os.environ.get("PYTHONPATH") or str(ROOT), str(HELPERS)))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def command(script: str, *arguments: str, processes: int = 2) -> list[str]:
    """Return the torchrun command of a script (``trainer``, or ``trainer zero3``). torchrun picks a free port."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    return [sys.executable, *launch, *_called(script), *arguments]


def _called(script: str) -> list[str]:
    file, *options = script.split()
    return [str(ROOT / "tests" / "distributed" / f"{file}.py"), *options]


def launched(entry: str) -> dict[str, Any]:
    """Run a script, given as ``raw``, ``trainer zero3`` or ``ulysses, 4 processes``.

    It returns the JSON that the script's first process wrote. A ``trainer`` script is first run in one process. The
    result is passed to the second run as the reference.
    """
    script, processes = split(entry)
    python = Path(sys.executable)
    with tempfile.TemporaryDirectory(prefix="fa2patch-") as folder:
        out, reference = Path(folder, "found.json"), Path(folder, "reference.pt")
        beside = {
            **variables(),
            # extensions that another release of DeepSpeed has built fail to load
            "TORCH_EXTENSIONS_DIR": str(python.parents[1] / "torch_extensions"),
            "TMPDIR": folder,
            "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }
        compared = script.startswith("trainer")
        if compared:
            _run([str(python), *_called(script), str(reference)], beside, reference)
        _run(command(script, str(out), *([str(reference)] if compared else []), processes=processes), beside, out)
        return dict(json.loads(out.read_text(encoding="utf-8")))


def _run(launch: list[str], variables: dict[str, str], out: Path) -> None:
    """Run a command and check that it wrote its file. After a timeout the whole process group is killed."""
    process = subprocess.Popen(
        launch, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        said, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        raise RuntimeError(f"{' '.join(launch[-3:])}: not ready after {LIMIT} s:\n{said[-3000:]}") from None
    if not out.exists():
        raise RuntimeError(f"{' '.join(launch[-3:])} ended with {process.returncode}:\n{said[-3000:]}")
