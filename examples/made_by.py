"""What results of examples are dated with: the command, the date, the commit and the versions."""

from __future__ import annotations

import shlex
import subprocess
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any


def made_by(command: list[str]) -> dict[str, Any]:
    """Return what results are dated with: the command, the date, the commit of this clone, and versions."""
    return {
        "command": shlex.join(command),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": commit(),
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate")},
    }


def commit() -> str | None:
    """Return the commit of the clone that this file is in, with ``-dirty`` if files differ; None without a clone."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
