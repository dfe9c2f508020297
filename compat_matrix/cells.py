"""The data classes of the evidence: a cell (one architecture in one version), an environment, and all results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from packaging.version import Version

from . import commits

Key = TypeVar("Key")
Value = TypeVar("Value")

STATES = ("ok", "refused", "xfail", "fail", "absent")
UPSTREAM_STATES = ("ok", "plain", "leak", "error", "unknown")
# A packed row whose position_ids restart, and no other arguments.
ONE_ROW = "one row"


@dataclass(frozen=True)
class Checked:
    ok: int  # the number of points that hold
    # each by point, with the reason
    not_applicable: Mapping[str, str]
    alone_fails: Mapping[str, str]  # Transformers alone fails at these, which leaves nothing to compare with
    failures: Mapping[str, str]

    @property
    def was_run(self) -> bool:
        # "load" stands for all points if the model cannot be loaded, "document" if it fails alone on one document.
        return bool(self.ok or self.failures) or not (
            {*self.not_applicable} == {"load"} or {*self.alone_fails} == {"document"}
        )


@dataclass(frozen=True)
class Upstream:
    implementation: str
    rows: Mapping[str, str]  # each "ok", "leak", "error: what it raised" or "unknown"

    @property
    def one_row(self) -> str:
        return self.rows.get(ONE_ROW, "unknown").partition(":")[0]

    @property
    def every_row(self) -> bool:
        return bool(self.rows) and all(result == "ok" for result in self.rows.values())

    @property
    def state(self) -> str:
        return ("ok" if self.every_row else "plain") if self.one_row == "ok" else self.one_row


@dataclass(frozen=True)
class Made:
    commit: str  # the last change of the code that the cell depends on, in 12 digits; empty if unknown
    dirty: bool | None  # whether that code differed from the commit; None if unknown
    torch: str
    when: str  # when the check began
    seconds: float  # the processor's; of cells from before 2026-11-26, the clock's
    # hashes of the code that the cell executed, by item; None if it was made before cells had keys
    key: Mapping[str, str] | None = None

    @property
    def code(self) -> str:
        return commits.named({"commit": self.commit, "dirty": self.dirty})


@dataclass(frozen=True)
class Cell:
    state: str  # one of STATES
    reason: str = ""
    link: str = ""  # where a known failure is reported
    seam: tuple[str, ...] = ()
    checked: Mapping[str, Checked] = field(default_factory=dict)  # by attn_implementation
    alone: tuple[Upstream, ...] = ()  # by attn_implementation; totals count the first
    made: Made | None = None  # None only for an absent cell
    points: tuple[str, ...] = ()  # that were asked for

    @property
    def upstream(self) -> Upstream | None:
        return self.alone[0] if self.alone else None


ABSENT = Cell("absent")


@dataclass(frozen=True)
class Environment:
    name: str
    transformers: str
    python: str
    wrapt: str
    flash_attn: str  # its version, "stand-in" or "none"
    device: str  # "cpu", or the name of the GPU
    kernel: str
    points: tuple[str, ...]
    upstream_rows: tuple[str, ...]  # kinds of row that Transformers alone was run on
    cells: Mapping[str, Cell]
    requirements: tuple[str, ...] = ()  # the Python, too; empty if the evidence does not say
    allowed_to_fail: bool = False  # its failures are then no failures of the matrix

    @property
    def order(self) -> tuple[Version, str]:
        return Version(self.transformers), self.name

    @property
    def counts(self) -> bool:
        # Another stack of a release that has its own environment does not count.
        return not self.allowed_to_fail and self.name == self.transformers

    @property
    def made(self) -> tuple[Made, ...]:
        found = (cell.made for cell in self.cells.values() if cell.made)
        return tuple(sorted(found, key=lambda made: made.when, reverse=True))

    @property
    def codes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(made.code for made in self.made))

    @property
    def torch(self) -> str:
        return " and ".join(dict.fromkeys(made.torch for made in self.made))

    @property
    def dates(self) -> str:
        days = sorted(made.when[:10] for made in self.made)
        return " to ".join(dict.fromkeys([days[0], days[-1]])) if days else ""

    @property
    def minor(self) -> tuple[int, int]:
        return Version(self.transformers).major, Version(self.transformers).minor

    @property
    def failing(self) -> list[str]:
        return [f"{name}: {cell.reason}" for name, cell in self.cells.items() if cell.state == "fail"]

    def cell(self, architecture: str) -> Cell:
        return self.cells.get(architecture, ABSENT)


@dataclass(frozen=True)
class Score:
    states: Counter[str]
    one_row: Counter[str]  # what Transformers alone gives on the plain row
    every_row: int  # cells in which Transformers alone is right on every row

    @property
    def present(self) -> int:
        return sum(self.states.values()) - self.states["absent"]

    @property
    def measured(self) -> int:
        return sum(self.one_row[result] for result in ("ok", "leak", "error"))


@dataclass(frozen=True)
class Results:
    environments: tuple[Environment, ...]  # the oldest Transformers first
    missing: tuple[str, ...] = ()  # wanted environments without evidence

    @property
    def counted(self) -> tuple[Environment, ...]:
        return tuple(environment for environment in self.environments if environment.counts)

    @property
    def architectures(self) -> tuple[str, ...]:
        return _names(self.environments)

    @property
    def upstream_rows(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row for environment in self.environments for row in environment.upstream_rows))

    @property
    def made(self) -> list[Made]:
        return [made for environment in self.environments for made in environment.made]

    @property
    def code(self) -> str:
        return max(self.made, key=lambda made: made.when).code if self.made else ""

    @cached_property
    def _newest(self) -> Mapping[str, str]:
        # Each item has the hash of the newest cell that executed it.
        return dict(
            item for made in sorted(self.made, key=lambda made: made.when) if made.key for item in made.key.items()
        )

    def is_older(self, made: Made) -> bool:
        # A cell is older if newer cells executed one of its items in another form. Without a key, its commit decides.
        return made.code != self.code if made.key is None else not made.key.items() <= self._newest.items()

    def score(self, *environments: Environment) -> Score:
        architectures = _names(self.counted)
        return score(environment.cell(name) for environment in environments for name in architectures)


def _names(environments: Iterable[Environment]) -> tuple[str, ...]:
    return tuple(sorted({name for environment in environments for name in environment.cells}))


def score(cells: Iterable[Cell]) -> Score:
    cells = list(cells)
    upstream = [cell.upstream for cell in cells if cell.upstream]
    states, one_row = Counter(cell.state for cell in cells), Counter(run.one_row for run in upstream)
    return Score(states, one_row, sum(run.every_row for run in upstream))


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    found: dict[Key, list[Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found
