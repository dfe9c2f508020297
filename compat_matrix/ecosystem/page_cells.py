"""What cells of several tables are made of."""

from __future__ import annotations

from typing import Any


def number(value: float | None) -> str:
    """Return a difference with one digit."""
    return "" if value is None else "0" if value == 0 else f"{value:.0e}"


def word(finding: dict[str, Any]) -> str:
    """Return whether a check held."""
    return "ok" if finding["ok"] else "**failed**"
