"""Compare the bench of fa2patch now with that of another commit: ``python -m compat_matrix.bench.against REF``.

Both sides run the bench's code of now, on fa2patch of REF and on fa2patch of now. Each run is a process of its own, in
the order before, after, after, before, ..., so that a machine that gets slower does not favour one side. A difference
counts only if it is larger than the spread of one side's own runs.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import commits, environments
from ..screen import BarColumn, Console, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from . import PARTS, about, compared
from .__main__ import ENVIRONMENTS
from .table import Table

COMMAND = "python -m compat_matrix.bench.against"
BEFORE, AFTER = "before", "after"
LACKS = re.compile(r"^(?:ModuleNotFound|Import|Attribute)Error: .*\bfa2patch\b.*$", re.M)
"""What a process says at its end if the bench asks for something that this fa2patch does not have."""


class Failed(Exception):
    """A run of the bench failed; the message is the end of what it said."""


@dataclass(frozen=True)
class Sides:
    """A folder for each side, which holds its fa2patch, and one with the bench of both.

    Attributes:
        folder: the folder with all of these, and with the results.
        environments: where the bench keeps environments of other versions.
        quick: only see that it runs.
    """

    folder: Path
    environments: Path
    quick: bool

    def copy(self, commit: str) -> None:
        """Write fa2patch of the commit and of now, and the bench of now: what is edited during the runs changes none.

        Raises:
            NoCommit: there is no such commit.
            Failed: another fa2patch is imported than a side's own.
        """
        ignored = shutil.ignore_patterns("__pycache__", "evidence")
        commits.export(commit, "fa2patch", self.folder / BEFORE)
        shutil.copytree(commits.ROOT / "fa2patch", self.folder / AFTER / "fa2patch", ignore=ignored)
        shutil.copytree(commits.ROOT / "compat_matrix", self.folder / "bench" / "compat_matrix", ignore=ignored)
        for side in (BEFORE, AFTER):
            found = "import importlib.util as util; print(util.find_spec('fa2patch').origin)"
            file = self._python(side, "-c", found).strip()
            if not Path(file).resolve().is_relative_to((self.folder / side).resolve()):
                raise Failed(f"expected to import fa2patch of {side}, found {file}: is it installed as a hook?")

    def run(self, side: str, part: str, turn: int) -> dict[str, Any]:
        """Run a part once and return its result; raise :class:`Failed` if the process fails."""
        out = self.folder / "runs" / f"{turn}-{side}"
        given = ["--out", str(out), "--environments", str(self.environments.resolve())]
        self._python(side, "-m", "compat_matrix.bench", "--parts", part, *given, *(["--quick"] if self.quick else []))
        return about.read(out / f"{part}.json")

    def keep(self, part: str, commit: dict[str, Any], folder: Path) -> None:
        """Write the latest result of now's side as ``python -m compat_matrix.bench`` would, with its commit."""
        runs = sorted((self.folder / "runs").glob(f"*-{AFTER}/{part}.json"), key=lambda file: file.stat().st_mtime_ns)
        for file in runs[-1:]:
            about.write(folder / file.name, {**about.read(file), **commit})

    def _python(self, side: str, *arguments: str) -> str:
        bench = self.folder / "bench"
        given = environments.variables(bench)
        given["PYTHONPATH"] = os.pathsep.join(map(str, (self.folder / side, bench)))
        done = subprocess.run([sys.executable, *arguments], cwd=bench, capture_output=True, text=True, env=given)
        if done.returncode:
            raise Failed(done.stderr[-1500:])
        return done.stdout


def main(arguments: list[str] | None = None) -> int:
    """Compare the chosen parts, print a table for each, and write the same to ``--out``.

    Args:
        arguments: the command line; None reads ``sys.argv``.

    Returns:
        The exit code: 1 if a part failed. Slower rows and parts that the commit cannot run are no failures.
    """
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("ref", metavar="REF", help="the commit, branch or tag that is compared with the files of now")
    add("--parts", nargs="+", choices=PARTS, default=("kernels", "overhead"), metavar="P", help=", ".join(PARTS))
    add("--rounds", type=int, default=3, help="runs of each side, at least 2; default 3")
    add("--out", type=Path, help="folder for against.json and against.md")
    add("--keep", type=Path, help="folder for the last result of now's side, a JSON for each part")
    add("--environments", type=Path, default=ENVIRONMENTS, help="where environments are kept")
    add("--quick", action="store_true", help="only see that it runs: tiny, and few repeats")
    given = parser.parse_args(arguments)
    if given.rounds < 2:
        parser.error("--rounds: the noise is the spread of a side's own runs, so expected at least 2")
    with tempfile.TemporaryDirectory(prefix="fa2patch-against-") as folder:
        sides = Sides(Path(folder), given.environments, given.quick)
        try:
            before = commits.number(given.ref)
            sides.copy(before)
        except (commits.NoCommit, Failed) as error:
            parser.error(str(error))
        after = commits.here()
        found = all_parts(sides, given.parts, given.rounds)
        for part in given.parts if given.keep else ():
            sides.keep(part, after, given.keep)
    ends = f"before: commit {before[:12]}; after: {commits.named(after)}; {given.rounds} runs each"
    report(found, ends, Console() if sys.stdout.isatty() else Console(width=150))
    if given.out:
        asked = f"{COMMAND} {given.ref} --parts {' '.join(given.parts)} --rounds {given.rounds}"
        header = about.header(f"{asked}{' --quick' if given.quick else ''}")
        about.write(
            given.out / "against.json", {**header, BEFORE: {"commit": before}, AFTER: after, "parts": as_json(found)}
        )
        (given.out / "against.md").write_text(as_markdown(found, ends), encoding="utf-8")
    return int(any("error" in part for part in found.values() if isinstance(part, dict)))


Found = dict[str, "list[compared.Row] | dict[str, str]"]
"""By part: its rows, or why there are none as ``{"new": ...}`` or ``{"error": ...}``."""


def all_parts(sides: Sides, parts: list[str], rounds: int) -> Found:
    """Run each part ``rounds`` times on each side."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    found: Found = {}
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("against", total=2 * rounds * len(parts))
        for place, part in enumerate(parts, 1):
            found[part] = _one_part(sides, part, rounds, lambda: progress.update(task, advance=1))
            progress.update(task, description=part, completed=2 * rounds * place)
    return found


def _one_part(sides: Sides, part: str, rounds: int, advance: Any) -> list[compared.Row] | dict[str, str]:
    results: dict[str, list[dict[str, Any]]] = {BEFORE: [], AFTER: []}
    for turn, side in enumerate(order(rounds)):
        try:
            results[side].append(sides.run(side, part, turn))
        except Failed as error:
            lacks = LACKS.search(str(error)) if side == BEFORE else None
            return {"new": lacks[0]} if lacks else {"error": f"{side}: {error}"}
        advance()
    return compared.rows(results[BEFORE], results[AFTER])


def order(rounds: int) -> list[str]:
    """Return whose turn it is: before, after, after, before, before, ..."""
    turns = [(BEFORE, AFTER) if turn % 2 == 0 else (AFTER, BEFORE) for turn in range(rounds)]
    return [side for turn in turns for side in turn]


def _said(part: str, found: list[compared.Row] | dict[str, str]) -> Table | str:
    if isinstance(found, list):
        return compared.table(part, found) if found else f"{part}: its results hold no times"
    if "new" in found:
        return f"{part}: new, the commit cannot run it: {found['new']}"
    return f"{part}: failed: {found['error']}"


def report(found: Found, ends: str, console: Console) -> None:
    """Print a table, or one sentence, for each part."""
    console.print(ends, highlight=False)
    for part, rows in found.items():
        said = _said(part, rows)
        console.print(said.as_rich() if isinstance(said, Table) else said, highlight=False, markup=False)


def as_markdown(found: Found, ends: str) -> str:
    """Return the same as Markdown."""
    said = [_said(part, rows) for part, rows in found.items()]
    return "\n\n".join([ends, *(one.as_markdown() if isinstance(one, Table) else one for one in said)]) + "\n"


def as_json(found: Found) -> dict[str, Any]:
    """Return every run's times, by part."""
    return {
        part: {"rows": [row.as_json() for row in rows]} if isinstance(rows, list) else rows
        for part, rows in found.items()
    }


if __name__ == "__main__":
    sys.exit(main())
