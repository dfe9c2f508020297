"""Checks one version in its environment: runs two processes and merges their findings."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, Callable

from . import environments
from .check.found import ALONE, REFUSED_AND_PATCHED
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
    python = environments.make(version, folder.resolve())
    found = []
    for part in PARTS:
        doing(f"checking as {part} flash-attn")
        found.append(_part(python, packages, part, options))
    return merged(version, *found)


def text(evidence: dict[str, Any]) -> str:
    """Format the evidence of a version as JSON, with one line for each architecture."""
    head = {name: value for name, value in evidence.items() if name != "architectures"}
    cells = ",\n".join(f"  {json.dumps(name)}: {json.dumps(cell)}" for name, cell in evidence["architectures"].items())
    return f'{json.dumps(head, indent=1)[:-2]},\n "architectures": {{\n{cells}\n }}\n}}\n'


def _part(python: Path, packages: Path, part: str, options: tuple[str, ...]) -> dict[str, Any]:
    command = [str(python), "-m", "compat_matrix.check", "--flash-attn", part, *options]
    given = environments.variables(packages)
    done = subprocess.run(command, cwd=packages, capture_output=True, text=True, env=given)
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])
    return dict(json.loads(done.stdout))


def merged(version: environments.Version, without: dict[str, Any], with_flash: dict[str, Any]) -> dict[str, Any]:
    """Merge the findings of the two processes, and add what versions.toml and xfail.toml say."""
    architectures = {}
    for name in {**without["architectures"], **with_flash["architectures"]}:
        first, second = (part["architectures"].get(name, {}) for part in (without, with_flash))
        cell = {**first, **second}
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
        architectures[name] = {**cell, **known_failure(name, version.transformers, cell)}
    header = {"format": FORMAT, "name": version.name, **without, "flash_attn": with_flash["flash_attn"]}
    header["seconds"] = round(without["seconds"] + with_flash["seconds"], 1)
    if version.allowed_to_fail:
        header["allowed_to_fail"] = True
    return {**header, "architectures": architectures}


def _failing_alone(part: dict[str, Any]) -> dict[str, Any]:
    """Each implementation's points, not run, if Transformers alone raises errors for every row with all of them."""
    outcomes = {implementation: [*rows.values()] for implementation, rows in part["upstream"].items()}
    if not all(rows and all(row.startswith("error: ") for row in rows) for rows in outcomes.values()):
        return {}
    return {implementation: {"n/a": {ALONE: rows[0][len("error: ") :]}} for implementation, rows in outcomes.items()}


def known_failure(architecture: str, transformers: str, cell: dict[str, Any]) -> dict[str, str]:
    """The reason and link that xfail.toml has for a cell; empty unless every failure in it is the known one.

    If no point was run, the failures are those of Transformers alone.
    """
    runs = list(cell.get("fa2patch", {}).values())
    failed = [what for run in runs for what in run.get("fail", {}).values()]
    if not any(run.get("ok") for run in runs):
        failed += [run["n/a"][ALONE] for run in runs if ALONE in run.get("n/a", {})]
    for known in environments.tomllib.loads((environments.HERE / "xfail.toml").read_text())["xfail"]:
        minors = [minor for minor in known["versions"] if f"{transformers}.".startswith(f"{minor}.")]
        if (
            architecture in known["architectures"]
            and minors
            and failed
            and all(known["error"] in what for what in failed)
        ):
            return {"xfail": known["reason"], "link": known["link"]}
    return {}
