"""The evidence of what Transformers alone does, for ``fa2patch doctor``: fa2patch/upstream.json."""

from __future__ import annotations

import json
from typing import Any

from ..cells import Results


def known(results: Results) -> str:
    """By minor: how many architectures were measured, in how many each row is right, and which of them are not."""
    found: dict[str, Any] = {}
    for environment in results.counted:
        if environment.name != environment.transformers:
            continue  # a stack of a period, or another wrapt
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
