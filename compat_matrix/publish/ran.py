"""Counts in how many cells each point was run, and what vouches for it in the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ..cells import Cell, Results
from ..check.found import BY_SEEDS, ON_TEXT

WHY = {BY_SEEDS: "shared", ON_TEXT: "text"}
"""How a reason is counted. Any other reason is one of the architecture's or of the version's."""

COLUMNS = {
    "ran": "run",
    "shared": "the shared seam vouches",
    "text": "not run on rows with pictures or sound",
    "other": "not run for another reason, below",
}
"""The columns of the table, by how a cell is counted."""


def points(results: Results) -> dict[str, Counter[str]]:
    """For each point, the isolated cells that totals count, by the keys of :data:`COLUMNS`."""
    found: dict[str, Counter[str]] = {}
    for environment in results.counted:
        for point in environment.points:
            kinds = (_how(cell, point) for cell in environment.cells.values() if cell.state == "ok")
            found.setdefault(point, Counter()).update(kinds)
    return dict(sorted(found.items()))


def implementations(results: Results) -> Counter[str]:
    """In how many isolated cells that totals count points held with each ``attn_implementation``."""
    return Counter(name for cell in _isolated(results) for name, run in cell.checked.items() if run.ok)


def table(results: Results) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of the table of :func:`points`."""
    rows = [[f"`{point}`", *(f"{counts[column]:,}" for column in COLUMNS)] for point, counts in points(results).items()]
    return ["point", *COLUMNS.values()], rows


def sentence(results: Results) -> str:
    """One sentence about :func:`implementations`."""
    every = sum(1 for _ in _isolated(results))
    held = implementations(results)
    rest = every - held["flash_attention_2"]
    parts = ", ".join(f"{held[name]:,} loaded as {name}" for name in ("flash_attention_2", "sdpa", "eager"))
    return (
        f"Of {every:,} isolated cells, points were run in {parts}. In {rest:,} the version cannot load the model as "
        "flash_attention_2, or cannot compute one document with it."
    )


def _isolated(results: Results) -> Iterable[Cell]:
    return (cell for each in results.counted for cell in each.cells.values() if cell.state == "ok")


def _how(cell: Cell, point: str) -> str:
    reasons = [{**run.not_applicable, **run.alone_fails}.get(point) for run in cell.checked.values() if run.was_run]
    if None in reasons:
        return "ran"
    return next((WHY[reason] for reason in reasons if reason in WHY), "other")
