"""The peak of memory of one step, in a process of its own: ``python -m compat_matrix.bench.memory KIND RIVAL``."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

CLEAR, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def added(step: Callable[[], Any]) -> int:
    """The bytes that a call has in use at its peak beyond those in use before it; on Linux, or on a GPU."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    CLEAR.write_text("5")  # the peak becomes what is in use now (proc(5))
    before = _status("VmRSS")
    step()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def of_a_step(kind: str, rival: str, tokens: int, layers: int, hidden: int) -> int:
    """Measure a rival's step on documents of one kind (``bench_steps.kinds``) in a new process, in bytes.

    Raises:
        RuntimeError: the process fails.
    """
    command = [sys.executable, "-m", "compat_matrix.bench.memory", kind, rival, *map(str, (tokens, layers, hidden))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])
    return int(json.loads(done.stdout)["added"])


def main(arguments: list[str] | None = None) -> None:
    """Print what the step of a rival adds, as JSON."""
    parser = argparse.ArgumentParser(prog="python -m compat_matrix.bench.memory", description=__doc__)
    parser.add_argument("kind")
    parser.add_argument("rival")
    parser.add_argument("sizes", nargs=3, type=int, metavar="N", help="tokens, layers and hidden size")
    given = parser.parse_args(arguments)
    import torch

    from .bench_steps import kinds, steps

    torch.set_num_threads(1)
    tokens, layers, hidden = given.sizes
    step = steps(kinds(tokens)[given.kind], layers, hidden, only=given.rival)[given.rival]
    print(json.dumps({"added": added(step)}))


if __name__ == "__main__":
    main()
