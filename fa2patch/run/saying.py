"""The messages of ``fa2patch run`` on stderr."""

from __future__ import annotations

import os
import sys


def say(what: str) -> None:
    """Print a line on stderr, on rank 0 only."""
    rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
    if rank in ("0", "") and sys.stderr is not None:
        print(f"fa2patch: {what}", file=sys.stderr, flush=True)
