"""Check fa2patch in any number of Transformers versions: ``python -m compat_matrix --versions 4.43.4 5.23.0``."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import environments

ROOT = environments.HERE.parent
EVIDENCE = environments.HERE / "evidence"
IMPLEMENTATIONS = ("without", "with")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m compat_matrix", description=__doc__)
    parser.add_argument(
        "--versions", nargs="+", metavar="V", help="blocks of versions.toml, or any release; default: all"
    )
    parser.add_argument("--families", nargs="+", metavar="F", help="default: all fourteen")
    parser.add_argument("--points", nargs="+", metavar="P", help="default: all (functions of compat_matrix/points)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="versions checked at a time")
    parser.add_argument("--environments", type=Path, default=ROOT / ".compat", help="where environments are kept")
    parser.add_argument("--evidence", type=Path, default=EVIDENCE, help="where a JSON for each version goes")
    parser.add_argument("--resume", action="store_true", help="skip versions whose evidence is there and all ok")
    given = parser.parse_args(arguments)
    wanted = [environments.version(name) for name in given.versions or environments.versions()]
    given.evidence.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    results: dict[str, dict[str, Any]] = {}
    with Progress(*columns, console=console) as progress, ThreadPoolExecutor(given.jobs) as pool:
        task = progress.add_task("versions", total=len(wanted))
        started = {pool.submit(check, version, given): version for version in wanted}
        for future in as_completed(started):
            version = started[future]
            try:
                results[version.name] = future.result()
            except Exception as error:
                results[version.name] = {"error": f"{type(error).__name__}: {error}"}
            progress.update(task, advance=1)
            bad = failures(results[version.name])
            console.print(f"{version.name}: {'ok' if not bad else f'{len(bad)} failed'}")
    ordered = {version.name: results[version.name] for version in wanted}
    report(ordered, Console() if sys.stdout.isatty() else Console(width=190))
    return 1 if any(failures(result) for result in ordered.values()) else 0


def check(version: environments.Version, given: argparse.Namespace) -> dict[str, Any]:
    """The evidence of one version: one process without flash-attn, one with its stand-in."""
    file = given.evidence / f"{version.name}.json"
    if given.resume and file.exists() and not failures(json.loads(file.read_text())):
        return dict(json.loads(file.read_text()))
    python = environments.make(version, given.environments)
    evidence: dict[str, Any] = {}
    for flash_attn in IMPLEMENTATIONS:
        command = [str(python), "-m", "compat_matrix.check", "--flash-attn", flash_attn]
        for option in ("families", "points"):
            if getattr(given, option):
                command += [f"--{option}", *getattr(given, option)]
        done = subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-1500:])
        evidence[flash_attn] = json.loads(done.stdout)
    if not given.families and not given.points:
        file.write_text(json.dumps(evidence, indent=1) + "\n")
    return evidence


def failures(evidence: dict[str, Any]) -> list[str]:
    """``family implementation point: what was found`` for everything that is not ok."""
    if "error" in evidence:
        return [evidence["error"]]
    return [
        f"{family} {implementation} {point}: {result}"
        for part in evidence.values()
        for family, cells in part["cells"].items()
        if cells != "absent"
        for implementation, points in cells.items()
        for point, result in points.items()
        if result != "ok" and not result.startswith("n/a: ")
    ]


def report(results: dict[str, dict[str, Any]], console: Console) -> None:
    """The families x versions table, then what failed, then every reason why something does not apply."""
    families = {family: None for evidence in results.values() for part in evidence.values() for family in _cells(part)}
    table = Table("version", *families, title="fa2patch: packed rows isolated")
    for name, evidence in results.items():
        table.add_row(name, *(_state(evidence, family) for family in families))
    console.print(table)
    for name, evidence in results.items():
        for failure in failures(evidence):
            console.print(f"[red]{name}[/red] {failure}", highlight=False)
    reasons: dict[str, set[str]] = {}
    for name, evidence in results.items():
        for part in evidence.values():
            for family, cells in _cells(part).items():
                for points in cells.values() if cells != "absent" else ():
                    for point, result in points.items():
                        if result.startswith("n/a: "):
                            reasons.setdefault(f"{family} {point}: {result[5:]}", set()).add(name)
    for reason, names in sorted(reasons.items()):
        console.print(f"does not apply: {reason} ({len(names)} versions)", highlight=False)


def _cells(part: Any) -> dict[str, Any]:
    return part["cells"] if isinstance(part, dict) else {}


def _state(evidence: dict[str, Any], family: str) -> str:
    if "error" in evidence:
        return "[red]error[/red]"
    cells = [part["cells"].get(family, "absent") for part in evidence.values()]
    if "absent" in cells:
        return "-"
    return (
        "[red]FAIL[/red]" if any(failures({"": {"cells": {family: cell}}}) for cell in cells) else "[green]ok[/green]"
    )


if __name__ == "__main__":
    sys.exit(main())
