"""Prints a user's matrix as a terminal table, as Markdown or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..cells import Upstream, grouped
from ..diffable import table as table_of
from .matrix import Row

# the state of Transformers alone on the packed rows of upstream.ROWS
ALONE = {"ok": "ok", "plain": "only the plain row", "leak": "LEAKS", "error": "fails", "unknown": "not run"}

COLOURS = {"ok": "green", "refused": "yellow", "absent": "dim"}


def markdown(rows: Sequence[Row]) -> str:
    versions = [labels(rows)[name] for name in dict.fromkeys(row.version.name for row in rows)]
    said = ([name, *(_state(row) + _alone(row, " / alone: ") for row in of)] for name, of in _by_model(rows))
    reasons = "\n".join(f"- {reason}" for reason in explanations(rows))
    return "\n\n".join(filter(None, [table_of(["model", *versions], said), LEGEND, reasons]))


LEGEND = "First with fa2patch, then Transformers alone on the same packed rows."


def table(rows: Sequence[Row]) -> Any:
    from rich.table import Table
    from rich.text import Text

    versions = [labels(rows)[name] for name in dict.fromkeys(row.version.name for row in rows)]
    made = Table(caption=LEGEND)
    for number, name in enumerate(["model", *versions]):
        made.add_column(name, overflow="fold", no_wrap=number == 0)
    for name, cells in _by_model(rows):
        states = ((row, Text(_state(row), COLOURS.get(row.cell.state, "bold red"))) for row in cells)
        made.add_row(Text(name), *(text.append(_alone(row, "\nalone: "), "default") for row, text in states))
    return made


def as_json(rows: Sequence[Row], ok: bool) -> str:
    versions = {row.version.name: row.version for row in rows}
    return json.dumps(
        {
            "ok": ok,
            "environments": [
                {"name": version.name, "python": version.python, "requirements": version.requirements}
                for version in versions.values()
            ],
            "cells": [
                {
                    "model": row.model.name,
                    "model_type": row.model.kind,
                    "environment": row.version.name,
                    "transformers": row.version.transformers,
                    "fa2patch": row.cell.state,
                    "reason": row.cell.reason,
                    "upstream": _upstream(row).state,
                    "upstream_rows": dict(_upstream(row).rows),
                    "notes": list(row.notes),
                }
                for row in rows
            ],
        },
        indent=1,
    )


def explanations(rows: Sequence[Row]) -> list[str]:
    # Versions with the same text share a line.
    said = []
    for row in rows:
        if row.cell.reason:
            said.append((f"{row.model.name} {row.cell.state}: {' '.join(row.cell.reason.split())}", row.version.name))
        said += [(f"{row.model.name}: {note}", row.version.name) for note in row.notes]
    return [f"{', '.join(versions)}: {what}" for what, versions in grouped(said).items()]


def labels(rows: Sequence[Row]) -> dict[str, str]:
    # The release is an environment's label if it is unique.
    releases = {row.version.name: row.version.transformers for row in rows}
    all_of_them = list(releases.values())
    return {name: release if all_of_them.count(release) == 1 else name for name, release in releases.items()}


def _by_model(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    models = grouped((row.model, row) for row in rows)
    return [(m.name if m.name == m.kind else f"{m.name} ({m.kind})", cells) for m, cells in models.items()]


def _state(row: Row) -> str:
    state = row.cell.state
    return {"absent": "-", "ok": "ok", "refused": "refused"}.get(state, state.upper())


def _upstream(row: Row) -> Upstream:
    return row.cell.upstream or Upstream("", {})


def _alone(row: Row, before: str) -> str:
    return "" if row.cell.state in ("absent", "error") else before + ALONE[_upstream(row).state]
