"""Compare the times and counts in two sides' result files, whatever part they are of.

They are found by their keys, so a new part needs no code here. A key is a time's if one of its words is a unit
(``min_ms``, ``us_per_layer``, ``cpu_seconds``). Rates (``..._per_second``) become times too, so more is always slower.
Counts are those of waits for a device and of graphs.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .table import Table

UNITS = {"ns", "us", "ms", "s", "seconds"}
COUNTS = {"reads", "arguments", "derived", "graphs"}
RATE = "_per_second"


@dataclass(frozen=True)
class Row:
    """One time or count, measured several times on each side. All values have one unit, which the name says.

    Attributes:
        name: the path of the time in the result, such as ``rows, 1 x 2048, causal, reference, forward, min_ms``.
    """

    name: str
    before: list[float]
    after: list[float]

    @property
    def ratio(self) -> float | None:
        """The median after divided by the median before; None unless all values are above zero."""
        if min(*self.before, *self.after) <= 0:
            return None
        return statistics.median(self.after) / statistics.median(self.before)

    @property
    def noise(self) -> float | None:
        """The larger of both sides' spreads, most by least, of the same code; None unless all are above zero."""
        if self.ratio is None:
            return None
        return max(max(side) / min(side) for side in (self.before, self.after))

    @property
    def verdict(self) -> str:
        """``slower`` or ``faster`` if the ratio is further from 1 than the noise, else an empty string.

        A count may be zero, which has no ratio. Then every run of one side must be above every run of the other.
        """
        if self.ratio is None or self.noise is None:
            if min(*self.before, *self.after) < 0:
                return ""
            if min(self.after) > max(self.before):
                return "slower"
            return "faster" if max(self.after) < min(self.before) else ""
        return "slower" if self.ratio > self.noise else "faster" if self.ratio < 1 / self.noise else ""

    def as_json(self) -> dict[str, Any]:
        """Return everything about the row."""
        return {**vars(self), "ratio": self.ratio, "noise": self.noise, "verdict": self.verdict}


def rows(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[Row]:
    """Return the times and counts that all results of both sides have, in the order of the first."""
    sides = [[dict(times(result)) for result in side] for side in (before, after)]
    first, *others = [found for side in sides for found in side]
    common = [name for name in first if all(name in other for other in others)]
    return [Row(name, *([found[name] for found in side] for side in sides)) for name in common]


def times(found: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, float]]:
    """Yield the path and value of every time and count in a result. Lists of numbers, such as ranges, are left out."""
    if isinstance(found, list) and all(isinstance(item, dict) for item in found):
        for label, item in zip(_labels(found), found):
            yield from times(item, (*path, label))
    elif isinstance(found, dict):
        for key, value in found.items():
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                yield from times(value, (*path, key))
            elif key.endswith(RATE) and value > 0:
                yield ", ".join((*path, f"1e6 / {key}")), 1e6 / value
            elif key in COUNTS or UNITS.intersection(key.split("_")):
                yield ", ".join((*path, key)), float(value)


def _labels(items: list[dict[str, Any]]) -> list[str]:
    """Name the items of a list by as few of their leading texts and whole numbers as tell them apart, else by place."""
    told = [
        [value if isinstance(value, str) else f"{key} {value}" for key, value in item.items() if _tells(value)]
        for item in items
    ]
    for count in range(1, max(map(len, told), default=0) + 1):
        labels = [", ".join(words[:count]) for words in told]
        if len(set(labels)) == len(items):
            return labels
    return [str(place) for place in range(len(items))]


def _tells(value: Any) -> bool:
    return isinstance(value, (str, int)) and not isinstance(value, bool)


def table(part: str, found: list[Row]) -> Table:
    """Return a part's rows as a table."""
    lines = [
        [
            row.name,
            *(f"{statistics.median(side):.4g}" for side in (row.before, row.after)),
            *("" if value is None else f"{value:.3f}" for value in (row.ratio, row.noise)),
            f"**{row.verdict}**" if row.verdict else "",
        ]
        for row in found
    ]
    slower = sum(row.verdict == "slower" for row in found)
    notes = (
        f"{slower} of {len(found)} are slower, or more, than before by more than the noise. *Before* and *after* are "
        "medians of the runs, *ratio* is after / before, and *noise* is the most by the least of the runs of one side, "
        "for the side where that is larger. A row without a ratio has a value of zero or below."
    )
    return Table(part, ["", "before", "after", "ratio", "noise", ""], lines, notes)
