"""What ``fa2patch run`` prints, on stderr."""

from __future__ import annotations

import os
import sys


def say(what: str) -> None:
    """A line on stderr, of the first of all ranks only."""
    rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
    if rank in ("0", "") and sys.stderr is not None:
        print(f"fa2patch: {what}", file=sys.stderr, flush=True)
