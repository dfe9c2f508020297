"""Makes the two JSON files of the evidence that come with the package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fa2patch.evidence import ranges

from .. import diffable
from ..cells import Cell, Environment, Results
from ..tiny_models import OUT_OF_SCOPE
from . import words
from .need import SEEDS


def upstream(results: Results) -> str:
    """Return fa2patch/upstream.json, what Transformers alone does in each minor, for ``fa2patch doctor``."""
    found = {}
    for environment in results.counted:
        runs = {name: cell.upstream for name, cell in environment.cells.items() if cell.upstream}
        found[words.label([environment])] = {
            "release": environment.transformers,
            "measured": len(runs),
            "rows": {row: sum(run.rows.get(row) == "ok" for run in runs.values()) for row in environment.upstream_rows},
            "leak": sorted(name for name, run in runs.items() if run.one_row == "leak"),
            "error": sorted(name for name, run in runs.items() if run.one_row == "error"),
            "every_row": sorted(name for name, run in runs.items() if run.every_row),
            "refused": sorted(name for name, cell in environment.cells.items() if cell.state == "refused"),
        }
    return diffable.dumped(found, 1) + "\n"


def summary(results: Results) -> str:
    """Return fa2patch/evidence.json, for ``fa2patch architectures`` and ``fa2patch matrix``."""
    # Each architecture has its minors by state: "ok" has them by the seams, "failing" by the points that fail,
    # "refused" and "known failure" by the reason. Ranges of minors are texts such as "4.34-4.42".
    environments = results.counted
    minors = [words.label([environment]) for environment in environments]
    families = [name for name in SEEDS if name in results.architectures]
    names = [*families, *(name for name in results.architectures if name not in SEEDS)]
    found = {
        "releases": {minor: environment.transformers for minor, environment in zip(minors, environments)},
        "families": families,
        "out of scope": OUT_OF_SCOPE,
        "architectures": {name: _states(environments, minors, name) for name in names},
    }
    return diffable.dumped(found, 1, architectures=2) + "\n"


def _states(environments: Sequence[Environment], minors: Sequence[str], name: str) -> dict[str, Any]:
    found: dict[str, dict[str, list[str]]] = {}
    for environment, minor in zip(environments, minors):
        cell = environment.cell(name)
        if cell.state != "absent":
            state = {"xfail": "known failure", "fail": "failing"}.get(cell.state, cell.state)
            found.setdefault(state, {}).setdefault(_what(cell), []).append(minor)
    return {state: {key: ranges(minors, within) for key, within in keys.items()} for state, keys in found.items()}


def _what(cell: Cell) -> str:
    if cell.state == "ok":
        return " and ".join(cell.seam)
    failing = dict.fromkeys(point for run in cell.checked.values() for point in run.failures)
    if cell.state == "fail" and failing:
        return ", ".join(failing)
    sentence = " ".join(cell.reason.split()).partition(". ")[0].rstrip(".")
    kind, colon, rest = sentence.partition(": ")
    return rest if colon and kind.isidentifier() else sentence  # without the name of the error's class
