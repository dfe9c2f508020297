"""Check fa2patch in any number of Transformers versions: ``python -m compat_matrix --versions 4.43.4 5.23.0``."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from . import commits, environments, run
from .cells import STATES, Cell, Environment, score
from .results import Malformed, read_file
from .screen import BarColumn, Console, MofNCompleteColumn, Progress, Table, TextColumn, TimeElapsedColumn

ROOT = environments.HERE.parent
EVIDENCE = environments.HERE / "evidence"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns 1 if a version that is not allowed to fail has a failure, else 0."""
    parser = argparse.ArgumentParser(prog="python -m compat_matrix", description=__doc__)
    parser.add_argument(
        "--versions", nargs="+", metavar="V", help="blocks of versions.toml, or any release; default: all"
    )
    parser.add_argument("--families", nargs="+", metavar="F", help="architectures; default: all that a version has")
    parser.add_argument(
        "--of-each-kind",
        type=int,
        metavar="N",
        help="only N architectures of each kind: of one seam and one set of points in the committed evidence",
    )
    parser.add_argument(
        "--points", nargs="+", metavar="P", help="default: all, functions of compat_matrix/check/points"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="versions checked at a time")
    parser.add_argument("--environments", type=Path, default=ROOT / ".compat", help="where environments are kept")
    parser.add_argument("--evidence", type=Path, default=EVIDENCE, help="where a JSON for each version goes")
    parser.add_argument("--resume", action="store_true", help="check only what failed or has no evidence of this code")
    given = parser.parse_args(arguments)
    wanted = [environments.version(name) for name in given.versions or environments.versions()]
    given.evidence.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    results: dict[str, Environment | str] = {}
    packages = environments.only_our_packages()
    with packages as path, Progress(*columns, console=console) as progress, ThreadPoolExecutor(given.jobs) as pool:
        task = progress.add_task("versions", total=len(wanted))
        started = {pool.submit(check, version, given, path): version for version in wanted}
        for future in as_completed(started):
            version = started[future]
            try:
                results[version.name] = future.result()
            except Exception as error:
                results[version.name] = f"{type(error).__name__}: {error}"
            progress.update(task, advance=1)
            bad = failures(results[version.name])
            console.print(f"{version.name}: {'ok' if not bad else f'{len(bad)} failed'}")
            say(version.name, bad, console)
    ordered = {version.name: results[version.name] for version in wanted}
    report(ordered, Console() if sys.stdout.isatty() else Console(width=190))
    counted = [version.name for version in wanted if not version.allowed_to_fail]
    return 1 if any(failures(ordered[name]) for name in counted) else 0


def check(version: environments.Version, given: argparse.Namespace, packages: Path) -> Environment:
    """Check one version and return its evidence, which is written to a JSON file unless only part of it was checked.

    Args:
        version: The version to check.
        given: The parsed command line. With ``families`` or ``resume``, evidence that exists is kept for the rest; each
            cell that is kept says which points it was run with.
        packages: The folder that :func:`environments.only_our_packages` gives.
    """
    file = given.evidence / f"{version.name}.json"
    if given.of_each_kind:
        families = of_each_kind(EVIDENCE / file.name, given.of_each_kind)
        given = argparse.Namespace(**{**vars(given), "families": families})
    known: dict[str, Any] = {}
    if file.exists() and (given.resume or given.families):
        with contextlib.suppress(Malformed):
            before = read_file(file)
            known = _with_points(json.loads(file.read_text(encoding="utf-8")))
            if given.resume and not given.families:
                left = left_over(before.cells, commits.of_code())
                if not left:
                    return before
                given = argparse.Namespace(**{**vars(given), "families": left if len(left) < len(known) else None})
    options: list[str] = []
    for name, values in (("families", given.families or version.families), ("points", given.points)):
        if values:
            options += [f"--{name}", *values]
    found = run.evidence(version, given.environments, packages, *options)
    for cell in known.values():
        if cell["points"] == found["points"]:
            del cell["points"]
    found["architectures"] = {**known, **found["architectures"]}
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, file.name)
        made.write_text(run.text(found), encoding="utf-8")
        if not given.points and (known or not given.families or given.of_each_kind):
            shutil.copy(made, file)
        return read_file(made, partial=bool(given.points))


def left_over(cells: Mapping[str, Cell], code: dict[str, Any]) -> list[str]:
    """Return the architectures that failed, or were checked with other code than ``code``, or with changes to it."""
    now = (code["commit"] or "")[:12]
    return [
        name
        for name, cell in cells.items()
        if cell.state == "fail" or cell.made is None or (cell.made.commit, cell.made.dirty) != (now, False)
    ]


def of_each_kind(evidence: Path, count: int) -> list[str]:
    """Return the first architectures of each kind: of one state and seam, to which the same points apply.

    Args:
        evidence: The committed evidence of a version.
        count: The number of architectures of each kind.
    """
    kinds: dict[Any, list[str]] = {}
    for name, cell in read_file(evidence).cells.items():
        points = {run: tuple(sorted(checked.not_applicable)) for run, checked in cell.checked.items()}
        kinds.setdefault((cell.state, cell.seam, *sorted(points.items())), []).append(name)
    return [name for names in kinds.values() for name in names[:count]]


def _with_points(evidence: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The cells of a version's evidence, each with the points that it was run with."""
    return {name: {"points": evidence["points"], **cell} for name, cell in evidence["architectures"].items()}


def failures(evidence: Environment | str) -> list[str]:
    """One line ``architecture: reason`` for every cell that fails; an error is returned as it is."""
    if isinstance(evidence, str):
        return [evidence]
    return [f"{name}: {cell.reason}" for name, cell in evidence.cells.items() if cell.state == "fail"]


def report(results: dict[str, Environment | str], console: Console) -> None:
    """Print the counts of each version beside those of Transformers alone, then the failures."""
    table = Table("version", *STATES[:-1], "upstream: one row", "all five", title="fa2patch, and Transformers alone")
    for name, evidence in results.items():
        if isinstance(evidence, str):
            table.add_row(name, *["-"] * 3, "[red]error[/red]")
            continue
        found = score(evidence.cells.values())
        one = ", ".join(f"{found.one_row[what]} {what}" for what in ("ok", "leak", "error") if found.one_row[what])
        table.add_row(name, *(str(found.states[state]) for state in STATES[:-1]), one, str(found.every_row))
    console.print(table)
    for name, evidence in results.items():
        say(name, failures(evidence), console)


def say(name: str, bad: list[str], console: Console) -> None:
    """Print the failures of a version, each in a line of its own."""
    for failure in bad:
        console.print(name, style="red", end=" ")
        console.print(failure, highlight=False, soft_wrap=True, markup=False, emoji=False)  # a:sound:


if __name__ == "__main__":
    sys.exit(main())
