"""Reads xfail.toml: known failures of Transformers, which a cell must show to be ``xfail``."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from . import environments
from .check.found import ALONE, DOCUMENT


def judged(architecture: str, transformers: str, cell: Mapping[str, Any], points: Sequence[str]) -> dict[str, str]:
    """Return what xfail.toml says of a cell, as keys that are added to it. It is strict.

    Returns:
        ``xfail`` and ``link`` if every failure of the cell is the known one, in a point that the entry names; ``error``
        if the entry names a point that was run, and none fails; else nothing, and the cell's own failures count.
    """
    known = next((each for each in _entries() if _is_about(each, architecture, transformers)), None)
    if known is None or "refused" in cell or "error" in cell:
        return {}
    runs = list(cell.get("fa2patch", {}).values())
    failed = [found for run in runs for found in run.get("fail", {}).items()]
    if not any(run.get("ok") for run in runs):
        failed += [found for run in runs for found in run.get(ALONE, {}).items()]
    if not failed:
        works = f"xfail.toml expects {known['error']!r}, and nothing fails. Remove the version from the entry"
        return {"error": works} if {*known["points"]} & {*points, DOCUMENT} else {}
    if all(point in known["points"] and known["error"] in what for point, what in failed):
        return {"xfail": known["reason"], "link": known["link"]}
    return {}


def _is_about(entry: Mapping[str, Any], architecture: str, transformers: str) -> bool:
    of_version = any(f"{transformers}.".startswith(f"{minor}.") for minor in entry["versions"])
    return of_version and architecture in entry["architectures"]


@functools.cache
def _entries() -> list[dict[str, Any]]:
    return list(environments.tomllib.loads((environments.HERE / "xfail.toml").read_text())["xfail"])
