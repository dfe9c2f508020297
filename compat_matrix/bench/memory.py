"""The peak of memory of one call, in a process of its own."""

from __future__ import annotations

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


def of_process(module: str, *arguments: str) -> int:
    return int(printed(module, *arguments))


def printed(module: str, *arguments: str, python: Path | str = sys.executable) -> str:
    done = subprocess.run([str(python), "-m", module, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])
    return done.stdout
