"""Rows of results as tables of Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import diffable


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.{2 if abs(value) < 10 else 1 if abs(value) < 100 else 0}f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def markdown(rows: list[Mapping[str, Any]]) -> str:
    """Return rows as a table of Markdown: every column of any row, numbers with three digits or more."""
    head = list(dict.fromkeys(name for row in rows for name in row))
    return diffable.table(head, ([_shown(row.get(name, "")) for name in head] for row in rows), numbers=True)
