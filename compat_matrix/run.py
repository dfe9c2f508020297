"""Checks one version in its environment: runs two processes and merges their findings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable

from . import commits, environments
from .check.found import ALONE, DOCUMENT, REFUSED_AND_PATCHED
from .results import FORMAT

PARTS = ("without", "with")
"""One process runs without flash-attn, one with its stand-in."""


def evidence(
    version: environments.Version,
    folder: Path,
    packages: Path,
    *options: str,
    doing: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Check a version and return the findings in the format that ``results.read_file`` reads.

    Args:
        version: The version to check.
        folder: The folder with the environments.
        packages: The folder that ``environments.only_our_packages`` gives.
        options: Options for ``python -m compat_matrix.check``.
        doing: Called with what is done next.

    Raises:
        RuntimeError: The environment cannot be made, or one of the processes fails.
    """
    doing(f"preparing an environment with {', '.join(version.requirements)}")
    code = commits.of_code()
    python = environments.make(version, folder.resolve())
    found = []
    for part in PARTS:
        doing(f"checking as {part} flash-attn")
        found.append(_part(python, packages, part, options))
    changed = commits.of_code() != code
    return merged(version, *found, code={**code, "dirty": True} if changed else code)


def text(evidence: dict[str, Any]) -> str:
    """Format the evidence of a version as JSON, with one line for each architecture."""
    head = {name: value for name, value in evidence.items() if name != "architectures"}
    cells = ",\n".join(f"  {json.dumps(name)}: {json.dumps(cell)}" for name, cell in evidence["architectures"].items())
    return f'{json.dumps(head, indent=1)[:-2]},\n "architectures": {{\n{cells}\n }}\n}}\n'


def _part(python: Path, packages: Path, part: str, options: tuple[str, ...]) -> dict[str, Any]:
    return environments.printed(python, packages, "compat_matrix.check", "--flash-attn", part, *options)


def merged(
    version: environments.Version, without: dict[str, Any], with_flash: dict[str, Any], code: dict[str, Any]
) -> dict[str, Any]:
    """Merge the findings of the two processes, and add what versions.toml and xfail.toml say.

    Args:
        version: The version that was checked.
        without, with_flash: The findings without flash-attn and with its stand-in.
        code: ``commit`` and ``dirty`` of the code that was checked, which every cell says.
    """
    architectures = {}
    for name in {**without["architectures"], **with_flash["architectures"]}:
        first, second = (part["architectures"].get(name, {}) for part in (without, with_flash))
        cell = {**first, **second, "made": _made(code, first, second)}
        for key in ("fa2patch", "upstream"):
            if key in first or key in second:
                cell[key] = {**first.get(key, {}), **second.get(key, {})}
        if "refused" in cell and "seam" in cell:
            failing = _failing_alone(first if "refused" in first else second)
            if failing:  # what cannot be computed without fa2patch need not be refused
                del cell["refused"]
                cell["fa2patch"].update(failing)
            else:
                cell.setdefault("error", f"{REFUSED_AND_PATCHED}: {cell['refused']}"[:400])
        if first.get("seam", second.get("seam")) != second.get("seam", first.get("seam")):
            cell["error"] = f"seam {first['seam']} without flash-attn, {second['seam']} with it"
        expected = version.seam_of(name)
        cell = {**cell, "expected_seam": expected.split(" and ")} if expected else cell
        architectures[name] = {**cell, **known_failure(name, version.transformers, cell, without["points"])}
    header = {"format": FORMAT, "name": version.name, **without, "flash_attn": with_flash["flash_attn"]}
    if version.allowed_to_fail:
        header["allowed_to_fail"] = True
    return {**header, "architectures": architectures}


def _made(code: dict[str, Any], *parts: dict[str, Any]) -> dict[str, Any]:
    """What a cell was made with: both processes' seconds, the first one's time."""
    made = [part["made"] for part in parts if part]
    return {**code, **made[0], "seconds": round(sum(part["seconds"] for part in made), 1)}


def _failing_alone(part: dict[str, Any]) -> dict[str, Any]:
    """Each implementation's points, not run, if Transformers alone raises errors for every row with all of them."""
    outcomes = {implementation: [*rows.values()] for implementation, rows in part["upstream"].items()}
    if not all(rows and all(row.startswith("error: ") for row in rows) for rows in outcomes.values()):
        return {}
    return {implementation: {ALONE: {DOCUMENT: rows[0][len("error: ") :]}} for implementation, rows in outcomes.items()}


def known_failure(architecture: str, transformers: str, cell: dict[str, Any], points: list[str]) -> dict[str, str]:
    """What xfail.toml says of a cell, as keys that are added to it. It is strict.

    Returns:
        ``xfail`` and ``link`` if every failure of the cell is the known one, in a point that the entry names; ``error``
        if the entry names a point that was run, and none fails; else nothing, and the cell's own failures count.

    Args:
        architecture: The architecture.
        transformers: The version of Transformers.
        cell: The merged findings.
        points: The points that were run.
    """
    known = _entry(architecture, transformers)
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


def _entry(architecture: str, transformers: str) -> dict[str, Any] | None:
    """The entry of xfail.toml for an architecture in a version."""
    for known in environments.tomllib.loads((environments.HERE / "xfail.toml").read_text())["xfail"]:
        minors = [minor for minor in known["versions"] if f"{transformers}.".startswith(f"{minor}.")]
        if architecture in known["architectures"] and minors:
            return dict(known)
    return None
