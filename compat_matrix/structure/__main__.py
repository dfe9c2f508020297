"""Print how a package is built, before and after: ``python -m compat_matrix.structure --at COMMIT``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from ..screen import Console, Table
from . import counts
from .circles import circles
from .docstrings import undocumented
from .sources import Module, Unreadable, of_commit, of_folder

LONG_FUNCTION = 50
COMPLEX_FUNCTION = 12
LONG_FILE = 250
NOW = "working tree"

LABELS = {
    "files": "files",
    "lines": "lines",
    "code_lines": "lines of code, without blank lines, comments and docstrings",
    "functions": "functions",
    "long_functions": f"functions of over {LONG_FUNCTION} lines",
    "complex_functions": f"functions of a complexity over {COMPLEX_FUNCTION}, as ruff's C901 counts",
    "long_files": f"files of over {LONG_FILE} lines",
    "circles": "import circles",
    "uses_of_any": "uses of Any",
    "undocumented": "public definitions without a docstring",
}


@dataclass(frozen=True)
class Structure:
    """The measures of a package. :data:`LABELS` describes each field; tuples hold names."""

    files: int
    lines: int
    code_lines: int
    functions: int
    long_functions: tuple[str, ...]
    complex_functions: tuple[str, ...]
    long_files: tuple[str, ...]
    circles: tuple[str, ...]
    uses_of_any: int
    undocumented: tuple[str, ...]


def main(arguments: list[str] | None = None) -> int:
    """Measure the working tree and the commits, and print them side by side."""
    parser = argparse.ArgumentParser(prog="python -m compat_matrix.structure", description=__doc__)
    parser.add_argument("--package", type=Path, default=Path("fa2patch"), help="a folder; default: fa2patch")
    parser.add_argument("--at", nargs="+", default=[], metavar="COMMIT", help="measured beside the working tree")
    parser.add_argument("--json", action="store_true", help="print JSON, with all names, instead of a table")
    parser.add_argument("--names", action="store_true", help="name what has no docstring too")
    given = parser.parse_args(arguments)
    try:
        now = of_folder(given.package)
        columns = {commit: measured(of_commit(given.package, commit)) for commit in given.at}
        columns[NOW] = measured(now)
    except Unreadable as error:
        parser.error(str(error))
    if given.json:
        print(json.dumps({name: asdict(column) for name, column in columns.items()}, indent=1))
    else:
        report(columns, given.package.resolve().name, given.names)
    return 0


def measured(modules: Iterable[Module]) -> Structure:
    """Measure a package."""
    modules = list(modules)
    lengths = {module.path: counts.lines(module) for module in modules}
    functions = [
        (module.place(function, name), counts.length(function), counts.complexity(function))
        for module in modules
        for name, function in counts.functions(module.tree)
    ]
    return Structure(
        files=len(modules),
        lines=sum(lengths.values()),
        code_lines=sum(map(counts.code_lines, modules)),
        functions=len(functions),
        long_functions=_above(LONG_FUNCTION, ((place, length) for place, length, _ in functions)),
        complex_functions=_above(COMPLEX_FUNCTION, ((place, complexity) for place, _, complexity in functions)),
        long_files=_above(LONG_FILE, lengths.items()),
        circles=tuple(", ".join(circle) for circle in circles(modules)),
        uses_of_any=sum(counts.uses_of_any(module.tree) for module in modules),
        undocumented=tuple(place for module in modules for place in undocumented(module, modules)),
    )


def report(columns: dict[str, Structure], package: str, names: bool) -> None:
    """Print a table of numbers, and below it the names that they count."""
    console = Console() if sys.stdout.isatty() else Console(width=150)
    table = Table("", title=f"The structure of {package}")
    for name in columns:
        table.add_column(name, justify="right")
    for field, label in LABELS.items():
        values = [getattr(column, field) for column in columns.values()]
        table.add_row(label, *(f"{value if isinstance(value, int) else len(value):,}" for value in values))
    console.print(table)
    out = Console(soft_wrap=True, highlight=False, markup=False)
    for field, label in LABELS.items():
        found = {name: getattr(column, field) for name, column in columns.items()}
        if any(isinstance(value, tuple) and value for value in found.values()) and (names or field != "undocumented"):
            out.print(f"\n{label[0].upper()}{label[1:]}:")
            for name, places in found.items():
                out.print("\n".join([f"  {name}:{'' if places else ' none'}", *(f"    {place}" for place in places)]))


def _above(limit: int, sizes: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    """Return those over the limit, the largest first."""
    found = sorted(((place, size) for place, size in sizes if size > limit), key=lambda one: (-one[1], one[0]))
    return tuple(f"{place}: {size}" for place, size in found)


if __name__ == "__main__":
    sys.exit(main())
