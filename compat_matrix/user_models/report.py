"""Prints a user's matrix as a terminal table, as Markdown or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .matrix import Row

ALONE = {"ok": "ok", "plain": "only the plain row", "leak": "LEAKS", "error": "fails", "unknown": "not run"}
"""Words for the state of Transformers alone on the packed rows of ``upstream.ROWS``."""

COLOURS = {"ok": "green", "refused": "yellow", "absent": "dim"}


def markdown(rows: Sequence[Row]) -> str:
    """A Markdown table of models by versions, followed by the reasons."""
    versions = [labels(rows)[name] for name in dict.fromkeys(row.version.name for row in rows)]
    lines = ["| model | " + " | ".join(versions) + " |", "| --- " * (len(versions) + 1) + "|"]
    for name, cells in _by_model(rows):
        lines.append(f"| {name} | " + " | ".join(f"{_state(row)}{_alone(row, ' / alone: ')}" for row in cells) + " |")
    reasons = [f"- {reason}" for reason in explanations(rows)]
    return "\n".join([*lines, "", LEGEND, *([""] if reasons else []), *reasons])


LEGEND = "First with fa2patch, then Transformers alone on the same packed rows."


def table(rows: Sequence[Row]) -> Any:
    """A rich table of models by versions, for a terminal."""
    from rich.table import Table
    from rich.text import Text

    versions = [labels(rows)[name] for name in dict.fromkeys(row.version.name for row in rows)]
    made = Table(caption=LEGEND)
    for number, name in enumerate(["model", *versions]):
        made.add_column(name, overflow="fold", no_wrap=number == 0)
    for name, cells in _by_model(rows):
        shown = [Text(_state(row), COLOURS.get(row.state, "bold red")).append(_alone(row, "\nalone: "), "default")
                 for row in cells]  # fmt: skip
        made.add_row(Text(name), *shown)
    return made


def as_json(rows: Sequence[Row], ok: bool) -> str:
    """A JSON object with every cell and the requirements of every environment."""
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
                    "fa2patch": row.state,
                    "reason": row.reason,
                    "upstream": row.upstream,
                    "upstream_rows": row.upstream_rows,
                    "notes": list(row.notes),
                }
                for row in rows
            ],
        },
        indent=1,
    )


def explanations(rows: Sequence[Row]) -> list[str]:
    """Why cells are not ok and what was left out of configs; versions with the same text share a line."""
    said: dict[str, list[str]] = {}
    for row in rows:
        reasons = [f"{row.model.name} {row.state}: {' '.join(row.reason.split())}"] if row.reason else []
        for what in [*reasons, *(f"{row.model.name}: {note}" for note in row.notes)]:
            said.setdefault(what, []).append(row.version.name)
    return [f"{', '.join(versions)}: {what}" for what, versions in said.items()]


def labels(rows: Sequence[Row]) -> dict[str, str]:
    """The label of each environment, by name: its release if that is unique, else its name."""
    releases = {row.version.name: row.version.transformers for row in rows}
    all_of_them = list(releases.values())
    return {name: release if all_of_them.count(release) == 1 else name for name, release in releases.items()}


def _by_model(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    found = []
    for model in dict.fromkeys(row.model for row in rows):
        name = model.name if model.name == model.kind else f"{model.name} ({model.kind})"
        found.append((name, [row for row in rows if row.model == model]))
    return found


def _state(row: Row) -> str:
    return {"absent": "-", "ok": "ok", "refused": "refused"}.get(row.state, row.state.upper())


def _alone(row: Row, before: str) -> str:
    return "" if row.state in ("absent", "error") else before + ALONE[row.upstream]
