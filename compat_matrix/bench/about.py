"""The machine and versions of a measurement, and its JSON file."""

from __future__ import annotations

import json
import platform
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .. import commits


def header(command: str, device: str = "cpu") -> dict[str, Any]:
    """Return commit, device, versions, date and the command that repeats the measurement."""
    import torch  # not above: tables are made without torch
    import transformers

    return {
        "command": command,
        **commits.of_code("compat_matrix/bench"),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "device": torch.cuda.get_device_name() if device == "cuda" else processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def processor() -> str:
    """Return the processor's name from ``/proc/cpuinfo``, or from ``platform`` where that file is missing."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def write(file: Path, found: dict[str, Any]) -> None:
    """Write a result as indented JSON and create the folder if needed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def read(file: Path) -> dict[str, Any]:
    """Read a result file."""
    return dict(json.loads(file.read_text(encoding="utf-8")))
