"""What cells of several tables are made of."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from .. import commits
from ..publish import markdown


def number(value: float | None) -> str:
    """Return a difference with one digit."""
    return "" if value is None else "0" if value == 0 else f"{value:.0e}"


def word(finding: dict[str, Any]) -> str:
    """Return whether a check held."""
    return "ok" if finding["ok"] else "**failed**"


def stack_table(found: Mapping[str, dict[str, Any]], without: Collection[str] = ()) -> str:
    """Return the table of stacks: when they were run, with which code of fa2patch, and with which packages.

    Args:
        found: the evidence by stack.
        without: the packages that the table leaves out.
    """
    rows = []
    for name, evidence in found.items():
        made = [*evidence["made"].values()]
        dates, code = sorted({one["date"] for one in made}), sorted({*map(commits.named, made)})
        packages = (f"{package} {number}" for package, number in evidence["versions"].items() if package not in without)
        rows.append([name, ", ".join(dates), ", ".join(code), ", ".join(packages)])
    return "\n".join(markdown.table(["stack", "date", "made with", "packages"], rows))
