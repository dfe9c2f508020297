"""Chooses the cells that a change asks for, so that a run of minutes executes all that was changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from . import keys
from .cells import Cell, Environment

Place = tuple[str, str]
"""The name of an environment and an architecture."""


def chosen(environments: Iterable[Environment], sources: keys.Sources, count: int) -> list[Place]:
    """Choose cells of some environments.

    First come cells that together execute every changed item that any cell executes, those with the rarest item first.
    Then come cells of the kinds that have the fewest chosen cells: of one state and seam, to which the same points
    apply. The oldest and the newest environment are asked in turns, so that no age is left out. There are more cells
    than ``count`` if the changed items need them.
    """
    cells = {(each.name, name): cell for each in _from_both_ends(environments) for name, cell in each.cells.items()}
    changed = {place: _changed(cell, sources) for place, cell in cells.items()}
    users = Counter(item for items in changed.values() for item in items)
    found: list[Place] = []
    missing = set(users)
    for item, _ in sorted(users.items(), key=lambda pair: (pair[1], pair[0])):
        if item in missing:
            having = [place for place, items in changed.items() if item in items]
            found.append(max(having, key=lambda place: len(changed[place] & missing)))
            missing -= changed[found[-1]]
    kinds = Counter(_kind(cells[place]) for place in found)
    for _ in range(count - len(found)):
        left = [place for place in cells if place not in found]
        if not left:
            break
        found.append(min(left, key=lambda place: kinds[_kind(cells[place])]))
        kinds[_kind(cells[found[-1]])] += 1
    return found


def _changed(cell: Cell, sources: keys.Sources) -> set[str]:
    return set(sources.changed(cell.made.key)) if cell.made is not None and cell.made.key is not None else set()


def _kind(cell: Cell) -> Any:
    points = {name: tuple(sorted(run.not_applicable)) for name, run in cell.checked.items()}
    return cell.state, cell.seam, *sorted(points.items())


def _from_both_ends(environments: Iterable[Environment]) -> list[Environment]:
    left, ordered = list(environments), []
    while left:
        ordered.append(left.pop(-1 if len(ordered) % 2 else 0))
    return ordered
