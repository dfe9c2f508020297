"""Say whether fa2patch of now is slower than that of another commit: ``python -m compat_matrix.bench.against REF``.

Both sides run the bench of now, each run in a process of its own, in the order before, after, after, before, ..., so
that a machine that gets slower does not favour one side. Counts differ or do not. A time differs only if the ratio is
further from 1 than the spread of one side's own runs.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .. import commits, environments
from ..screen import Console, track
from . import figures
from .figures import PARTS

SIDES = ("before", "after")
CACHES = shutil.ignore_patterns("__pycache__")
Rows = list[dict[str, Any]]

_RUN = """
import sys, fa2patch  # before pytest puts the bench's own folder in front of the path
from compat_matrix.bench.__main__ import main
assert fa2patch.__file__.startswith(sys.argv[1]), fa2patch.__file__
sys.exit(main(sys.argv[2:]))
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m compat_matrix.bench.against", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("ref", metavar="REF", help="the commit, branch or tag that is compared with the files of now")
    add("--parts", nargs="+", choices=PARTS, default=["calls", "overhead"], metavar="P", help=", ".join(PARTS))
    add("--rounds", type=int, default=3, help="runs of each side, at least 2; default 3")
    add("--environments", type=Path, default=commits.ROOT / ".compat", help="where environments are kept")
    add("--quick", action="store_true", help="only see that it runs: tiny, and few repeats")
    given = parser.parse_args(arguments)
    if given.rounds < 2:
        parser.error("--rounds: the noise is the spread of a side's own runs, so expected at least 2")
    runs: dict[str, list[dict[str, Rows]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory(prefix="fa2patch-against-") as folder:
        try:
            before = commits.number(given.ref)
            commits.export(before, "fa2patch", Path(folder, "before"))
        except commits.NoCommit as error:
            parser.error(str(error))
        # a copy as well, because imports look into every file beside a package, which counts
        shutil.copytree(commits.ROOT / "fa2patch", Path(folder, "after", "fa2patch"), ignore=CACHES)
        for side in track(order(given.rounds), "against", console=Console(stderr=True)):
            runs[side].append(run(Path(folder, side).resolve(), given))
    print(f"before: commit {before[:12]}; after: {commits.named(commits.here())}; {given.rounds} runs each")
    for part in given.parts:
        figures.show(part, compared(*([of[part] for of in runs[side]] for side in SIDES)))
    return 0


def order(rounds: int) -> list[str]:
    # The turns are before, after, after, before, before, ...
    return [side for turn in range(rounds) for side in (SIDES if turn % 2 == 0 else SIDES[::-1])]


def run(packages: Path, given: argparse.Namespace) -> dict[str, Rows]:
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-c", _RUN, str(packages), "--parts", *given.parts, "--out", out]
        # in one word, or pytest takes the folder for a place of tests, and its parent's settings for the bench's
        command += [f"--environments={given.environments.resolve()}", *(["--quick"] if given.quick else [])]
        path = os.pathsep.join((str(packages), str(commits.ROOT)))
        variables = {**environments.variables(packages), "PYTHONPATH": path}
        done = subprocess.run(command, cwd=out, capture_output=True, text=True, env=variables)
        if done.returncode:
            sys.exit(f"{packages.name}: {done.stdout[-1500:]}\n{done.stderr[-1500:]}")
        return {part: figures.read(Path(out, f"{part}.json"))["rows"] for part in given.parts}


def compared(before: list[Rows], after: list[Rows]) -> Rows:
    # A column is a time if its name has a unit; rates (".../s") become times. Other whole numbers are counts. Ratios
    # and limits are left out.
    made = []
    for rows in zip(*before, *after):
        labels = {column: cell for column, cell in rows[0].items() if isinstance(cell, str)}
        texts = [cell for column, cell in labels.items() if all(row[column] == cell for row in rows)]
        for column, value in rows[0].items():
            timed = re.search(r"(^|[ ,/])(ms|µs|s)\b", column) is not None
            if not isinstance(value, str) and (timed or isinstance(value, int)):
                values = [1e6 / row[column] if "/s" in column else row[column] for row in rows]
                name = ", ".join([*texts, f"1e6 / {column}" if "/s" in column else column])
                made.append({"": name, **judged(values[: len(before)], values[len(before) :], timed)})
    return made


def judged(before: list[float], after: list[float], timed: bool) -> dict[str, Any]:
    # The noise is the most by the least of a side's own runs, for the side where that is larger. Without values above
    # zero there is no ratio, and times are not compared.
    first, last = statistics.median(before), statistics.median(after)
    positive = min(*before, *after) > 0
    noise = max(max(side) / min(side) for side in (before, after)) if timed and positive else 1.0
    verdict = ""
    if last > first * noise and (positive or not timed):
        verdict = "slower" if timed else "more"
    elif last * noise < first and (positive or not timed):
        verdict = "faster" if timed else "fewer"
    shown = {"ratio": round(last / first, 3) if positive else "", "noise": round(noise, 3) if timed else ""}
    return {"before": first, "after": last, **shown, "verdict": verdict}


if __name__ == "__main__":
    sys.exit(main())
