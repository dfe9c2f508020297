"""How commands print: JSON, tables, errors as one line, and progress."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

import click

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

# With fewer characters for a column, a table would be read one letter a line.
LEAST = 8


def print_json(found: object) -> None:
    click.echo(json.dumps(found, indent=1))


def new_console() -> Console:
    # The console is as wide as the terminal, or COLUMNS wide where there is none.
    from rich.console import Console

    given = os.environ.get("COLUMNS", "")
    wide = int(given) if given.isdecimal() and int(given) else 120
    return Console(width=None if sys.stdout.isatty() else wide, highlight=False)


def table_of(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> TableRows:
    return TableRows(columns, [*rows])


@dataclass(frozen=True)
class TableRows:
    """What rich prints as a table or, on a narrow console, as a list of its rows."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table | Text | Padding]:
        from rich.text import Text

        first = max((line.cell_len for row in self.rows for line in Text.from_markup(row[0]).split()), default=0)
        needed = 2 + first + (LEAST + 3) * (len(self.columns) - 1)
        yield from self._list() if options.max_width < needed else [self._table()]

    def _table(self) -> Table:
        # Long text is wrapped and never cut. The first column is not even wrapped.
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE)
        for number, name in enumerate(self.columns):
            table.add_column(name, overflow="fold", no_wrap=number == 0)
        for row in self.rows:
            table.add_row(*row)
        return table

    def _list(self) -> Iterator[Text | Padding]:
        from rich.padding import Padding
        from rich.text import Text

        for row in self.rows:
            yield Text.from_markup(row[0], style="bold")
            for name, cell in zip(self.columns[1:], row[1:]):
                if cell:
                    yield Padding(Text.from_markup(f"{name}: {cell}" if name else cell), (0, 0, 0, 2))


def escaped(text: object, style: str = "") -> str:
    # rich prints the text's square brackets as they are.
    from rich.markup import escape

    return f"[{style}]{escape(str(text))}[/]" if style else escape(str(text))


def in_one_line(error: BaseException) -> str:
    # A first line that ends with a colon announces the next one, which is kept, too.
    first, *rest = (str(error).strip() or "no message").splitlines()
    while rest and first.endswith(":"):
        first = f"{first} {rest.pop(0).strip()}"
    return f"{type(error).__name__}: {first}"


def write_file(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.BadParameter(f"{path} cannot be written: {error.strerror}.", param_hint="the file") from None


@contextlib.contextmanager
def progress_of(names: Sequence[str]) -> Iterator[Callable[..., None]]:
    # Threads may call the function that this yields.
    if not sys.stderr.isatty():
        yield lambda name, what, ended=False: click.echo(f"{name}: {what}", err=True)
        return
    from rich import progress
    from rich.console import Console

    described = progress.TextColumn("{task.description}", markup=False)
    columns: Any = (progress.SpinnerColumn(), described, progress.TimeElapsedColumn())
    with progress.Progress(*columns, console=Console(stderr=True)) as bars:
        tasks = {name: bars.add_task(f"{name}: waits", total=1, start=False) for name in names}

        def show(name: str, what: str, ended: bool = False) -> None:
            bars.start_task(tasks[name])
            bars.update(tasks[name], description=f"{name}: {what}", completed=int(ended))

        yield show
