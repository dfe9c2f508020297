"""The data classes of the evidence: a cell (one architecture in one version), an environment, and all results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from packaging.version import Version

STATES = ("ok", "refused", "xfail", "fail", "absent")
UPSTREAM_STATES = ("ok", "plain", "leak", "error", "unknown")
ONE_ROW = "one row"
"""The plain case: one packed row whose ``position_ids`` restart, and no other arguments."""


@dataclass(frozen=True)
class Checked:
    """The points of one ``attn_implementation`` of a cell.

    Attributes:
        ok: The number of points that hold.
        not_applicable: The reason for each point that does not apply.
        failures: The failure of each point that fails.
    """

    ok: int
    not_applicable: Mapping[str, str]
    failures: Mapping[str, str]


@dataclass(frozen=True)
class Upstream:
    """The same packed rows through Transformers alone.

    Attributes:
        implementation: The ``attn_implementation`` that was run.
        rows: The result of each kind of row: ``ok``, ``leak``, ``error: what it raised`` or ``unknown``.
    """

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
class Cell:
    """One architecture in one environment.

    Attributes:
        state: One of :data:`STATES`.
        reason: Why the cell is not ok; empty if it is.
        link: Where a known failure is reported; else empty.
        seam: The seams that the architecture was patched at.
        checked: The points of each ``attn_implementation``.
        alone: What Transformers alone does with each ``attn_implementation`` that was run; totals count the first.
    """

    state: str
    reason: str = ""
    link: str = ""
    seam: tuple[str, ...] = ()
    checked: Mapping[str, Checked] = field(default_factory=dict)
    alone: tuple[Upstream, ...] = ()

    @property
    def upstream(self) -> Upstream | None:
        """The run of Transformers alone that totals count; None if there is none."""
        return self.alone[0] if self.alone else None


ABSENT = Cell("absent")


@dataclass(frozen=True)
class Environment:
    """The evidence of one environment, read from one file.

    Attributes:
        name: The environment's name, which is the file's too.
        transformers, torch, python, wrapt: Version numbers.
        flash_attn: The version of flash-attn, ``stand-in`` or ``none``.
        device: ``cpu``, or the name of the GPU.
        kernel: The kernel that was checked.
        date: The date of the check, ``YYYY-MM-DD``.
        seconds: The run time.
        points: The points that were run.
        upstream_rows: The kinds of row that Transformers alone was run on.
        cells: The cells by architecture.
        allowed_to_fail: Whether totals leave the environment out.
    """

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
        """The sort key: the Transformers version, then the name."""
        return Version(self.transformers), self.name

    @property
    def minor(self) -> tuple[int, int]:
        """The major and minor number of the Transformers version."""
        return Version(self.transformers).major, Version(self.transformers).minor

    def cell(self, architecture: str) -> Cell:
        """The cell of an architecture; :data:`ABSENT` if the environment does not have it."""
        return self.cells.get(architecture, ABSENT)


@dataclass(frozen=True)
class Score:
    """Counts of cells.

    Attributes:
        states: The number of cells by state.
        one_row: The number of cells by what Transformers alone gives on the plain row.
        every_row: The number of cells in which Transformers alone is right on every row.
    """

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
    """All evidence, the oldest Transformers first.

    Attributes:
        environments: The environments with evidence in the main folder.
        gpu: Environments whose device is not the CPU.
    """

    environments: tuple[Environment, ...]
    gpu: tuple[Environment, ...] = ()
    missing: tuple[str, ...] = ()
    """Names of environments that are wanted and have no evidence."""

    @property
    def counted(self) -> tuple[Environment, ...]:
        """The environments that totals count: those that are not allowed to fail."""
        return tuple(environment for environment in self.environments if not environment.allowed_to_fail)

    @property
    def architectures(self) -> tuple[str, ...]:
        """The architectures of any environment, sorted."""
        return _names(self.environments)

    @property
    def upstream_rows(self) -> tuple[str, ...]:
        """The kinds of row of all environments, each once."""
        return tuple(dict.fromkeys(row for environment in self.environments for row in environment.upstream_rows))

    def score(self, *environments: Environment) -> Score:
        """Count the cells of these environments, over the architectures of all counted environments."""
        architectures = _names(self.counted)
        return score(environment.cell(name) for environment in environments for name in architectures)


def score(cells: Iterable[Cell]) -> Score:
    """Count cells."""
    cells = list(cells)
    upstream = [cell.upstream for cell in cells if cell.upstream]
    return Score(
        Counter(cell.state for cell in cells),
        Counter(run.one_row for run in upstream),
        sum(run.every_row for run in upstream),
    )


def _names(environments: Iterable[Environment]) -> tuple[str, ...]:
    return tuple(sorted({name for environment in environments for name in environment.cells}))
