"""Makes fa2patch/upstream.json, the evidence of what Transformers alone does, for ``fa2patch doctor``."""

from __future__ import annotations

import json
from typing import Any

from ..cells import Results


def known(results: Results) -> str:
    """The JSON text with the facts of each minor.

    They are the release, the number of architectures measured, in how many of them each kind of row is right, and which
    architectures leak or fail on the plain row, are right on every row, or are refused by fa2patch.
    """
    found: dict[str, Any] = {}
    for environment in results.counted:
        runs = {name: cell.upstream for name, cell in environment.cells.items() if cell.upstream}
        found["{}.{}".format(*environment.minor)] = {
            "release": environment.transformers,
            "measured": len(runs),
            "rows": {row: sum(run.rows.get(row) == "ok" for run in runs.values()) for row in environment.upstream_rows},
            "leak": sorted(name for name, run in runs.items() if run.one_row == "leak"),
            "error": sorted(name for name, run in runs.items() if run.one_row == "error"),
            "every_row": sorted(name for name, run in runs.items() if run.every_row),
            "refused": sorted(name for name, cell in environment.cells.items() if cell.state == "refused"),
        }
    lines = ",\n".join(f" {json.dumps(minor)}: {json.dumps(facts)}" for minor, facts in found.items())
    return f"{{\n{lines}\n}}\n"
