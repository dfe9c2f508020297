"""Compare fresh evidence with the committed, cell by cell: ``python -m compat_matrix.agreed FRESH``.

A cell agrees if its state, its points and what Transformers alone does are the same. Texts of errors and what made the
cells may differ; architectures that were not checked afresh, and points that one of both was not run with, are left
out. So is the seam: it is in the plans, which are compared for all cells and are never old, as evidence may be.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from .cells import Cell
from .check.found import VOUCHED
from .results import EVIDENCE, Malformed, read_file


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m compat_matrix.agreed", description=__doc__)
    parser.add_argument("fresh", type=Path, help="folder with fresh evidence")
    parser.add_argument("--committed", type=Path, default=EVIDENCE, help="folder of the evidence that is compared")
    given = parser.parse_args(arguments)
    files = sorted(given.fresh.glob("*.json"))
    try:
        found = [line for file in files for line in differences(file, given.committed / file.name)]
    except (Malformed, FileNotFoundError) as error:
        parser.error(str(error))
    if not files:
        parser.error(f"{given.fresh}: expected evidence, found no JSON")
    print("\n".join(found) or f"{len(files)} versions agree with what is committed.")
    return int(bool(found))


def differences(fresh: Path, committed: Path) -> Iterator[str]:
    before = read_file(committed).cells
    for name, cell in read_file(fresh).cells.items():
        if name not in before:
            yield f"{fresh.stem}: {name}: not in the committed evidence"
            continue
        known = before[name]
        if known.state == "fail" and cell.state == "ok":
            continue  # a mend: the committed cell ages until it is made again
        if known.reason.startswith(VOUCHED):  # it held itself, and the cell that vouches for it did not
            known = replace(known, state="ok")
        old, new = told(known, cell), told(cell, known)
        for what in sorted({*old, *new}):
            if old.get(what) != new.get(what):
                said = f" ({cell.reason})" if what == "state" and cell.reason else ""
                yield f"{fresh.stem}: {name}: {what}: committed {old.get(what)}, found {new.get(what)}{said}"


def told(cell: Cell, other: Cell) -> dict[str, object]:
    # Only points that both were run with are compared: evidence may be older than a point, or a point vouched for.
    failures = {point for run in cell.checked.values() for point in run.failures}
    only_there = cell.state == "fail" and failures and failures <= {*cell.points} - {*other.points}
    found: dict[str, object] = {"state": "ok" if only_there else cell.state}
    for name in {*cell.checked} & {*other.checked}:
        run, points = cell.checked[name], ran(cell, name) & ran(other, name)
        without = {"do not apply": {*run.not_applicable}, "fail": {*run.failures}, "fail alone": {*run.alone_fails}}
        without["hold"] = points.difference(*without.values()) if run.was_run else set()
        for what, these in without.items():
            found[f"{name}, points that {what}"] = sorted(these & points if run.was_run else these)
    for each in cell.alone:
        rows = {row: result.partition(":")[0] for row, result in each.rows.items()}
        found[f"{each.implementation}, Transformers alone"] = rows
    return found


def ran(cell: Cell, implementation: str) -> set[str]:
    reasons = cell.checked[implementation].not_applicable
    return {point for point in cell.points if not reasons.get(point, "").startswith(VOUCHED)}


if __name__ == "__main__":
    sys.exit(main())
