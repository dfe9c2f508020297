"""Evidence as ``compat_matrix.run`` writes it."""

from compat_matrix.results import CORE, FORMAT

POINTS = [*CORE, "windows"]
MADE = {"commit": "1" * 40, "dirty": False, "torch": "2.13.0+cpu", "when": "2026-11-21T09:30:00+00:00", "seconds": 6.1}
GOOD = {"ok": len(CORE), "n/a": {"windows": "no sliding window"}, "fail": {}}


def evidence(name, architectures, /, **changes):
    # Cells that do not say what they were made with get :data:`MADE`.
    made = {key: {"made": MADE, **cell} if isinstance(cell, dict) else cell for key, cell in architectures.items()}
    return {
        "format": FORMAT, "name": name, "transformers": name.partition("-")[0], "python": "3.11.7", "wrapt": "2.1.1",
        "flash_attn": "stand-in", "device": "cpu", "kernel": "reference", "points": POINTS, "upstream_rows": [],
        "architectures": made, **changes,
    }  # fmt: skip
