"""Says how many cells are stale, and because of which code: ``python -m compat_matrix.stale``.

A cell is stale if an item of its key is another one now (see ``keys``), if it has no key, or if versions.toml asks for
another environment. Evidence ages; only a release needs cells that are not stale. ``--commit`` says how many cells a
commit alone makes stale.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import commits, environments
from .cells import Cell, Environment
from .keys import Sources
from .results import EVIDENCE, read

NO_KEY = "it was made before cells had keys"


def cells(environment: Environment, sources: Sources) -> dict[str, list[str]]:
    wanted = environments.version(environment.name).stated
    other = [f"versions.toml: {environment.name}"] if list(environment.requirements) != wanted else []
    keyed = {name: cell.made.key if cell.made else None for name, cell in environment.cells.items()}
    found = {name: [NO_KEY] if key is None else sources.changed(key) + other for name, key in keyed.items()}
    return {name: against for name, against in found.items() if against}


def by_commit(environment: Environment, commit: str) -> dict[str, list[str]]:
    before, after = _sources(f"{commit}^"), _sources(commit)
    keyed = {name: cell.made.key for name, cell in environment.cells.items() if cell.made and cell.made.key}
    changed = {name: after.changed(before.again(key)) for name, key in keyed.items()}
    return {name: items for name, items in changed.items() if items}


@functools.lru_cache(maxsize=4)
def _sources(commit: str) -> Sources:
    # Everything is read here, because the files are gone afterwards.
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        for package in ("fa2patch", "compat_matrix"):
            commits.export(commit, package, home)
        found = Sources(home)
        for file in home.rglob("*.py"):
            found.file(file.relative_to(home).as_posix())
    return found


# the name of an environment, and an architecture
Place = tuple[str, str]


def sample(evidence: Iterable[Environment], sources: Sources, count: int) -> list[Place]:
    """Choose the cells that a change asks for, so that a run of minutes executes all that was changed."""
    # First come cells that together execute every changed item that any cell executes, those with the rarest item
    # first. Then come cells of the kinds that have the fewest chosen cells. Environments are taken from both ends in
    # turns, so that no age is left out. There are more cells than "count" if the changed items need them.
    left, ordered = list(evidence), list[Environment]()
    while left:
        ordered.append(left.pop(-1 if len(ordered) % 2 else 0))
    every = {(each.name, name): cell for each in ordered for name, cell in each.cells.items()}
    keyed = {place: cell.made.key for place, cell in every.items() if cell.made}
    changed = {place: set(sources.changed(key) if key is not None else ()) for place, key in keyed.items()}
    users = Counter(item for items in changed.values() for item in items)
    found: list[Place] = []
    missing = set(users)
    for item, _ in sorted(users.items(), key=lambda pair: (pair[1], pair[0])):
        if item in missing:
            having = [place for place, items in changed.items() if item in items]
            found.append(max(having, key=lambda place: len(changed[place] & missing)))
            missing -= changed[found[-1]]
    kinds = Counter(_kind(every[place]) for place in found)
    for _ in range(min(count, len(every)) - len(found)):
        rest = (place for place in every if place not in found)
        found.append(min(rest, key=lambda place: kinds[_kind(every[place])]))
        kinds[_kind(every[found[-1]])] += 1
    return found


def _kind(cell: Cell) -> Any:
    points = {name: tuple(sorted(run.not_applicable)) for name, run in cell.checked.items()}
    return cell.state, cell.seam, *sorted(points.items())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m compat_matrix.stale", description=__doc__)
    parser.add_argument("--evidence", type=Path, default=EVIDENCE, help="folder of the evidence")
    parser.add_argument("--cells", action="store_true", help="name every stale cell")
    parser.add_argument("--commit", help="only what this commit changed, for the cells that have a key")
    given = parser.parse_args(arguments)
    sources, total, reasons = Sources(environments.HERE.parent), 0, Counter[str]()
    results = read(given.evidence)
    try:
        if given.commit:
            commits.number(f"{given.commit}^")
    except commits.NoCommit as error:
        parser.error(f"--commit: expected a commit that has one before it: {error}")
    for environment in results.environments:
        found = by_commit(environment, given.commit) if given.commit else cells(environment, sources)
        total += len(found)
        reasons.update(item for items in found.values() for item in items)
        if found:
            print(f"{environment.name}: {len(found)} of {len(environment.cells)} cells are stale")
        for name, items in found.items() if given.cells else ():
            print(f"  {name}: {', '.join(items[:3])}")
    for item, count in reasons.most_common(20):
        print(f"{count:6,} because of {item}")
    keyed = sum(made.key is not None for made in results.made)
    counted = f"{keyed:,} cells that have a key" if given.commit else f"{len(results.made):,} cells"
    print(f"{total:,} of {counted} are stale.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
