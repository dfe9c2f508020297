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
ONE_ROW = "one row"
"""The plain case: one packed row whose ``position_ids`` restart, and no other arguments."""


@dataclass(frozen=True)
class Checked:
    """The points of one ``attn_implementation`` of a cell: how many hold, and the reasons of the others.

    ``alone_fails`` are those that Transformers alone fails at, which leaves nothing to compare with.
    """

    ok: int
    not_applicable: Mapping[str, str]
    alone_fails: Mapping[str, str]
    failures: Mapping[str, str]

    @property
    def was_run(self) -> bool:
        """Whether points were run: the model can be loaded, and Transformers alone computes one document."""
        return bool(self.ok or self.failures) or not (
            {*self.not_applicable} == {"load"} or {*self.alone_fails} == {"document"}
        )


@dataclass(frozen=True)
class Upstream:
    """The same packed rows through Transformers alone: ``ok``, ``leak``, ``error: what it raised`` or ``unknown``."""

    implementation: str
    rows: Mapping[str, str]

    @property
    def one_row(self) -> str:
        """The result of the plain row: ``ok``, ``leak`` or ``error``; ``unknown`` if it was not run."""
        return self.rows.get(ONE_ROW, "unknown").partition(":")[0]

    @property
    def every_row(self) -> bool:
        """Whether there are rows and all of them are ``ok``."""
        return bool(self.rows) and all(result == "ok" for result in self.rows.values())

    @property
    def state(self) -> str:
        """``ok`` if every row is ok, ``plain`` if the plain row is ok and another is not, else :attr:`one_row`."""
        return ("ok" if self.every_row else "plain") if self.one_row == "ok" else self.one_row


@dataclass(frozen=True)
class Made:
    """What a cell was made with, and when its check began.

    Attributes:
        commit: The commit that last changed the code that the cell depends on, in 12 digits; empty if unknown.
        dirty: Whether that code differed from the commit; None if unknown.
        seconds: The processor's seconds; of cells from before 2026-11-26, the clock's.
        key: The hashes of the code that the cell executed, by item; None if it was made before cells had keys.
    """

    commit: str
    dirty: bool | None
    torch: str
    when: str
    seconds: float
    key: Mapping[str, str] | None = None

    @property
    def code(self) -> str:
        """The commit in words."""
        return commits.named({"commit": self.commit, "dirty": self.dirty})


@dataclass(frozen=True)
class Cell:
    """One architecture in one environment.

    Attributes:
        reason: Why the state, one of :data:`STATES`, is not ok.
        link: Where a known failure is reported; else empty.
        checked: The points of each ``attn_implementation``.
        alone: What Transformers alone does with each ``attn_implementation`` that was run; totals count the first.
        made: None only for an absent cell.
        points: The points that were asked for.
    """

    state: str
    reason: str = ""
    link: str = ""
    seam: tuple[str, ...] = ()
    checked: Mapping[str, Checked] = field(default_factory=dict)
    alone: tuple[Upstream, ...] = ()
    made: Made | None = None
    points: tuple[str, ...] = ()

    @property
    def upstream(self) -> Upstream | None:
        """The run of Transformers alone that totals count; None if there is none."""
        return self.alone[0] if self.alone else None


ABSENT = Cell("absent")


@dataclass(frozen=True)
class Environment:
    """The evidence of one environment, read from one file of the same name.

    Attributes:
        flash_attn: The version of flash-attn, ``stand-in`` or ``none``.
        device: ``cpu``, or the name of the GPU.
        upstream_rows: The kinds of row that Transformers alone was run on.
        requirements: The Python and the requirements that it was made of; empty if the evidence does not say.
        allowed_to_fail: Whether its failures are no failures of the matrix.
    """

    name: str
    transformers: str
    python: str
    wrapt: str
    flash_attn: str
    device: str
    kernel: str
    points: tuple[str, ...]
    upstream_rows: tuple[str, ...]
    cells: Mapping[str, Cell]
    requirements: tuple[str, ...] = ()
    allowed_to_fail: bool = False

    @property
    def order(self) -> tuple[Version, str]:
        """The sort key."""
        return Version(self.transformers), self.name

    @property
    def counts(self) -> bool:
        """Whether totals count it: not if it is allowed to fail, or another stack of a release that has its own."""
        return not self.allowed_to_fail and self.name == self.transformers

    @property
    def made(self) -> tuple[Made, ...]:
        """What its cells were made with, the newest first."""
        found = (cell.made for cell in self.cells.values() if cell.made)
        return tuple(sorted(found, key=lambda made: made.when, reverse=True))

    @property
    def codes(self) -> tuple[str, ...]:
        """The code that made its cells, the newest first."""
        return tuple(dict.fromkeys(made.code for made in self.made))

    @property
    def torch(self) -> str:
        """The version of torch that checked its cells; several are joined by ``and``."""
        return " and ".join(dict.fromkeys(made.torch for made in self.made))

    @property
    def dates(self) -> str:
        """The day, or the first and the last day, on which its cells were checked."""
        days = sorted(made.when[:10] for made in self.made)
        return " to ".join(dict.fromkeys([days[0], days[-1]])) if days else ""

    @property
    def minor(self) -> tuple[int, int]:
        """The major and minor number of the Transformers version."""
        return Version(self.transformers).major, Version(self.transformers).minor

    def cell(self, architecture: str) -> Cell:
        """The cell of an architecture; :data:`ABSENT` if the environment does not have it."""
        return self.cells.get(architecture, ABSENT)


@dataclass(frozen=True)
class Score:
    """Counts of cells: by state, by what Transformers alone gives on the plain row, and where every row is right."""

    states: Counter[str]
    one_row: Counter[str]
    every_row: int

    @property
    def present(self) -> int:
        """The number of cells whose version has the architecture."""
        return sum(self.states.values()) - self.states["absent"]

    @property
    def measured(self) -> int:
        """The number of cells in which Transformers alone was run."""
        return sum(self.one_row[result] for result in ("ok", "leak", "error"))


@dataclass(frozen=True)
class Results:
    """All evidence, the oldest Transformers first: in ``gpu`` of other devices; what is ``missing`` is wanted."""

    environments: tuple[Environment, ...]
    gpu: tuple[Environment, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def counted(self) -> tuple[Environment, ...]:
        """The environments that totals count: one for each release."""
        return tuple(environment for environment in self.environments if environment.counts)

    @property
    def architectures(self) -> tuple[str, ...]:
        """The architectures of any environment, sorted."""
        return _names(self.environments)

    @property
    def upstream_rows(self) -> tuple[str, ...]:
        """The kinds of row of all environments, each once."""
        return tuple(dict.fromkeys(row for environment in self.environments for row in environment.upstream_rows))

    @property
    def made(self) -> list[Made]:
        """What each cell was made with."""
        return [made for environment in self.environments for made in environment.made]

    @property
    def code(self) -> str:
        """The code of the newest cell."""
        return max(self.made, key=lambda made: made.when).code if self.made else ""

    @cached_property
    def _newest(self) -> Mapping[str, str]:
        """The hash of each item in the newest cell that executed it."""
        return dict(
            item for made in sorted(self.made, key=lambda made: made.when) if made.key for item in made.key.items()
        )

    def is_older(self, made: Made) -> bool:
        """Whether a cell executed code that newer cells executed in another form; without a key, that is its commit."""
        return made.code != self.code if made.key is None else not made.key.items() <= self._newest.items()

    def score(self, *environments: Environment) -> Score:
        """Count the cells of these environments, over the architectures of all counted environments."""
        architectures = _names(self.counted)
        return score(environment.cell(name) for environment in environments for name in architectures)


def _names(environments: Iterable[Environment]) -> tuple[str, ...]:
    return tuple(sorted({name for environment in environments for name in environment.cells}))


def score(cells: Iterable[Cell]) -> Score:
    """Count cells."""
    cells = list(cells)
    upstream = [cell.upstream for cell in cells if cell.upstream]
    states, one_row = Counter(cell.state for cell in cells), Counter(run.one_row for run in upstream)
    return Score(states, one_row, sum(run.every_row for run in upstream))


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Group values by their keys. Both stay in the order in which they come."""
    found: dict[Key, list[Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found
