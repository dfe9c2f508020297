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
# Seconds. The longest script runs every architecture, and takes six minutes on a machine with nothing else to do.
LIMIT = 1800


def launched(entry: str) -> dict[str, Any]:
    # ``entry`` is ``raw``, ``trainer zero3`` or ``ulysses, 4 processes``. The result is the JSON that the script's
    # first process wrote.
    # A ``trainer`` script is first run in one process. Its result is passed to the second run as the reference.
    (file, *options), processes = split(entry)[0].split(), split(entry)[1]
    python, called = sys.executable, [str(ROOT / "tests" / "distributed" / f"{file}.py"), *options]
    with tempfile.TemporaryDirectory(prefix="fa2patch-") as folder:
        out, reference = Path(folder, "found.json"), Path(folder, "reference.pt")
        variables = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            # in a stack, it has fa2patch and compat_matrix already
            "PYTHONPATH": os.pathsep.join((os.environ.get("PYTHONPATH") or str(ROOT), str(HELPERS))),
            # extensions that another release of DeepSpeed has built fail to load
            "TORCH_EXTENSIONS_DIR": str(Path(python).parents[1] / "torch_extensions"),
            "TMPDIR": folder,
            "PATH": f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }
        told = [str(out)]
        if file == "trainer":
            _run([python, *called, str(reference)], variables, reference)
            told.append(str(reference))
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        _run([python, *launch, *called, *told], variables, out)  # torchrun picks a free port
        return dict(json.loads(out.read_text(encoding="utf-8")))


def _run(launch: list[str], variables: dict[str, str], out: Path) -> None:
    # After a timeout the whole process group is killed.
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
