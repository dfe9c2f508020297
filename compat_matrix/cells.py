"""What is known of an architecture in a version, of a version, and of all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from packaging.version import Version

STATES = ("ok", "refused", "xfail", "fail", "absent")
UPSTREAM_STATES = ("ok", "plain", "leak", "error", "unknown")
ONE_ROW = "one row"
"""The plain case: one packed row, ``position_ids`` restarting, nothing else."""


@dataclass(frozen=True)
class Checked:
    """One ``attn_implementation`` of a cell: how many points hold, which do not apply and why, which fail and how."""

    ok: int
    not_applicable: Mapping[str, str]
    failures: Mapping[str, str]


@dataclass(frozen=True)
class Upstream:
    """The same packed rows through Transformers alone. Each is ``ok``, ``leak`` or ``error: what it raised``."""

    implementation: str
    rows: Mapping[str, str]

    @property
    def one_row(self) -> str:
        """``ok``, ``leak`` or ``error``; ``unknown`` if it was not run."""
        return self.rows.get(ONE_ROW, "unknown").partition(":")[0]

    @property
    def every_row(self) -> bool:
        return bool(self.rows) and all(result == "ok" for result in self.rows.values())

    @property
    def state(self) -> str:
        """``ok`` if every row is, ``plain`` if one row is and another is not, else what became of one row."""
        return ("ok" if self.every_row else "plain") if self.one_row == "ok" else self.one_row


@dataclass(frozen=True)
class Cell:
    """One architecture in one environment."""

    state: str
    reason: str = ""
    link: str = ""
    seam: tuple[str, ...] = ()
    checked: Mapping[str, Checked] = field(default_factory=dict)
    upstream: Upstream | None = None


ABSENT = Cell("absent")


@dataclass(frozen=True)
class Environment:
    """One file of evidence."""

    name: str
    transformers: str
    torch: str
    python: str
    wrapt: str
    flash_attn: str
    device: str
    kernel: str
    date: str
    seconds: float
    points: tuple[str, ...]
    upstream_rows: tuple[str, ...]
    cells: Mapping[str, Cell]
    allowed_to_fail: bool = False

    @property
    def order(self) -> tuple[Version, str]:
        return Version(self.transformers), self.name

    @property
    def minor(self) -> tuple[int, int]:
        return Version(self.transformers).major, Version(self.transformers).minor

    def cell(self, architecture: str) -> Cell:
        return self.cells.get(architecture, ABSENT)


@dataclass(frozen=True)
class Score:
    """Cells by state, and beside them upstream's: what one row gives, and in how many every row is right."""

    states: Counter[str]
    one_row: Counter[str]
    every_row: int

    @property
    def present(self) -> int:
        return sum(self.states.values()) - self.states["absent"]

    @property
    def measured(self) -> int:
        """Cells in which Transformers alone was run."""
        return sum(self.one_row[result] for result in ("ok", "leak", "error"))


@dataclass(frozen=True)
class Results:
    """Every environment that left evidence, oldest Transformers first."""

    environments: tuple[Environment, ...]
    gpu: tuple[Environment, ...] = ()
    missing: tuple[str, ...] = ()
    """Environments that are wanted and have no evidence."""

    @property
    def counted(self) -> tuple[Environment, ...]:
        """What totals are made of: without the environments that are allowed to fail."""
        return tuple(environment for environment in self.environments if not environment.allowed_to_fail)

    @property
    def architectures(self) -> tuple[str, ...]:
        return _names(self.environments)

    @property
    def upstream_rows(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row for environment in self.environments for row in environment.upstream_rows))

    def score(self, *environments: Environment) -> Score:
        """Of these environments' cells; the architectures are those of every counted environment."""
        architectures = _names(self.counted)
        return score(environment.cell(name) for environment in environments for name in architectures)


def score(cells: Iterable[Cell]) -> Score:
    cells = list(cells)
    upstream = [cell.upstream for cell in cells if cell.upstream]
    return Score(
        Counter(cell.state for cell in cells),
        Counter(run.one_row for run in upstream),
        sum(run.every_row for run in upstream),
    )


def _names(environments: Iterable[Environment]) -> tuple[str, ...]:
    return tuple(sorted({name for environment in environments for name in environment.cells}))
