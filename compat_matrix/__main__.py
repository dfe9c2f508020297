"""Check fa2patch in any number of Transformers versions: ``python -m compat_matrix --versions 4.43.4 newest``."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any, Callable

from . import diffable, environments, keys, plans, run, stale
from .cells import STATES, Environment, score
from .results import EVIDENCE, Malformed, read_data, read_file
from .screen import Console, Table, bars

ROOT = environments.HERE.parent
# The rotation runs every point of every cell once in so many nights.
NIGHTS = 7


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m compat_matrix", description=__doc__)
    add = parser.add_argument
    add("--versions", nargs="+", metavar="V", help="blocks of versions.toml, or any release; default: all")
    add("--families", nargs="+", metavar="F", help="architectures; default: all that a version has")
    add("--points", nargs="+", metavar="P", help="default: all, functions of compat_matrix/check/points")
    add("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="versions at a time")
    add("--environments", type=Path, default=ROOT / ".compat", help="where environments are kept")
    add("--evidence", type=Path, default=EVIDENCE, help="where a JSON for each version goes")
    add("--stale", action="store_true", help="check only cells that failed, are stale or are missing")
    add("--sample", type=int, metavar="N", help="only N cells, chosen by what changed since they ran")
    add("--all-points", action="store_true", help="let no architecture vouch for another one")
    add(
        "--rotation", type=int, metavar="K", choices=range(1, NIGHTS + 1),
        help=f"all points also for the K-th of {NIGHTS} parts of the architectures for which another one vouches",
    )  # fmt: skip
    given = parser.parse_args(arguments)
    wanted = [environments.version(name) for name in given.versions or environments.versions()]
    given.evidence.mkdir(parents=True, exist_ok=True)
    given.chosen = None
    if given.sample:
        committed = [read_file(EVIDENCE / f"{version.name}.json") for version in wanted]
        given.chosen = stale.sample(committed, keys.Sources(ROOT), given.sample)
        wanted = [version for version in wanted if version.name in dict(given.chosen)]
    # A text is the error of a version that could not be checked.
    results: dict[str, Environment | str] = {}
    with environments.only_our_packages() as packages, bars() as progress:
        task = progress.add_task("versions", total=len(wanted))
        cells = progress.add_task("cells", total=None)

        def checked(version: environments.Version) -> Environment:
            return check(version, given, packages, lambda: progress.advance(cells))

        for version, found in environments.done(checked, wanted, given.jobs):
            results[version.name] = f"{type(found).__name__}: {found}" if isinstance(found, Exception) else found
            progress.advance(task)
            bad = failures(results[version.name])
            progress.console.print(f"{version.name}: {'ok' if not bad else f'{len(bad)} failed'}")
            say(version.name, bad, progress.console)
    ordered = {version.name: results[version.name] for version in wanted}
    report(ordered, Console() if sys.stdout.isatty() else Console(width=190))
    # With --sample a failing cell does not count: compat_matrix.agreed compares it with the committed one.
    if given.sample:
        return int(any(isinstance(result, str) for result in ordered.values()))
    counted = [version.name for version in wanted if not version.allowed_to_fail]
    return 1 if any(failures(ordered[name]) for name in counted) else 0


def check(
    version: environments.Version, given: argparse.Namespace, packages: Path, checked: Callable[[], object]
) -> Environment:
    file = given.evidence / f"{version.name}.json"
    planned = plans.read().get(version.name)
    snapshots = planned.snapshots if planned else {}
    families = given.families or version.families
    if given.chosen is not None:
        families = [architecture for name, architecture in given.chosen if name == version.name]
    cells: dict[str, Any] = {}
    # Evidence that exists is kept for the other cells. Each kept cell names the points that it was run with.
    if file.exists() and (given.stale or given.families):
        with contextlib.suppress(Malformed):
            before = read_file(file)
            cells = run.unwritten(json.loads(file.read_text(encoding="utf-8")))
            if given.stale:
                known = families or list(dict.fromkeys([*snapshots, *before.cells]))
                families = left_over(known, before, keys.Sources(packages))
                if not families:
                    return before
    options = ["--families", *families] if families else []
    options += ["--points", *given.points] if given.points else []
    if not (given.all_points or given.points or given.chosen):
        there = {*(families or snapshots), *cells}
        vouched = {name: by for name, by in plans.vouchers(snapshots).items() if by in there}
        if given.rotation is not None:
            vouched = {name: by for name, by in vouched.items() if night(version.name, name) != given.rotation}
        options += ["--vouched", json.dumps(vouched)]

    def keep(header: dict[str, Any], name: str, cell: dict[str, Any]) -> None:
        checked()
        cells[name] = cell
        if not given.points:
            diffable.write(file, run.text(run.written(header, cells)))

    found = run.evidence(version, given.environments, packages, *options, keep=keep)
    if file.exists() and not given.points:
        return read_file(file)
    return read_data(found, version.name, partial=bool(given.points))


def left_over(names: Iterable[str], before: Environment, sources: keys.Sources) -> list[str]:
    old = stale.cells(before, sources)
    return [name for name in names if name in old or before.cell(name).state in ("fail", "absent")]


def night(version: str, architecture: str) -> int:
    """The night of the rotation in which all points of a cell are run."""
    return int(sha256(f"{version} {architecture}".encode()).hexdigest(), 16) % NIGHTS + 1


def failures(evidence: Environment | str) -> list[str]:
    return [evidence] if isinstance(evidence, str) else evidence.failing


def report(results: dict[str, Environment | str], console: Console) -> None:
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
    for failure in bad:
        console.print(name, style="red", end=" ")
        console.print(failure, highlight=False, soft_wrap=True, markup=False, emoji=False)  # a:sound:


if __name__ == "__main__":
    sys.exit(main())
