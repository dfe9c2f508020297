"""Transformers versions in bands, within which its attention code kept its shape."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from ..cells import Cell, Environment, Score, score

STARTS = ((4, 34), (4, 43), (4, 48), (4, 53), (5, 0))
"""Attention classes; one flash function for all of them; one interface for all; one module that makes masks; 5."""


@dataclass(frozen=True)
class Band:
    """Consecutive versions, oldest first."""

    environments: tuple[Environment, ...]

    @property
    def label(self) -> str:
        return span(self.environments[0].minor, self.environments[-1].minor)

    def score(self, *architectures: str) -> Score:
        """Counted in minors of these architectures: a minor is ok where every environment of it is."""
        minors: dict[tuple[str, tuple[int, int]], list[Cell]] = {}
        for environment in self.environments:
            for architecture in architectures:
                if architecture in environment.cells:
                    cell = environment.cells[architecture]
                    minors.setdefault((architecture, environment.minor), []).append(cell)
        return score(worst(cells) for cells in minors.values())


def bands(environments: Iterable[Environment]) -> list[Band]:
    """The bands that have evidence."""
    found: dict[int, list[Environment]] = {}
    for environment in environments:
        found.setdefault(max(bisect_right(STARTS, environment.minor), 1), []).append(environment)
    return [Band(tuple(found[start])) for start in sorted(found)]


def split(band: Band, columns: int) -> list[Band]:
    """As few bands as have at most so many environments, evenly."""
    parts = -(-len(band.environments) // columns)
    ends = [round(part * len(band.environments) / parts) for part in range(parts + 1)]
    return [Band(band.environments[start:end]) for start, end in zip(ends, ends[1:])]


def span(first: tuple[int, int], last: tuple[int, int]) -> str:
    """``4.34-4.42``, with a dash."""
    ends = [f"{major}.{minor}" for major, minor in dict.fromkeys((first, last))]
    return "\N{EN DASH}".join(ends)


def worst(cells: Iterable[Cell]) -> Cell:
    """What a minor is when it has more than one environment: its worst cell, with its worst upstream."""
    cells = list(cells)
    severity = ("absent", "ok", "refused", "xfail", "fail").index
    worst_cell = max(cells, key=lambda cell: severity(cell.state))
    runs = [cell.upstream for cell in cells if cell.upstream]
    how_bad = ("ok", "plain", "unknown", "leak", "error").index
    upstream = max(runs, key=lambda run: how_bad(run.state)) if runs else None
    return Cell(worst_cell.state, worst_cell.reason, worst_cell.link, upstream=upstream)
