"""How commands print: JSON, tables, errors as one line, and progress."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Union

import click

if TYPE_CHECKING:
    from rich.console import Console

# With fewer characters for a column, a table would be read one letter a line.
LEAST = 8


def new_console() -> Console:
    # The console is as wide as the terminal, or COLUMNS wide where there is none.
    from rich.console import Console

    given = os.environ.get("COLUMNS", "")
    wide = int(given) if given.isdecimal() and int(given) else 120
    return Console(width=None if sys.stdout.isatty() else wide, highlight=False)


class Table(NamedTuple):
    columns: Sequence[str]
    rows: Iterable[Sequence[Any]]  # of text with rich's markup, numbers and lists of texts


# Lines of text with rich's markup, and tables.
Shown = Iterable[Union[str, Table]]


def print_found(found: object, as_json: bool, shown: Shown) -> None:
    # `shown` is what a person reads of it; a generator, so that it is made only then.
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        show(new_console(), shown)


def show(console: Console, shown: Shown) -> None:
    for part in shown:
        if isinstance(part, Table):
            _print_table(console, *part)
        else:
            console.print(part)


def _print_table(console: Console, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    # A narrow console gets a list of the rows.
    from rich import box
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    shown = [[", ".join(cell) if isinstance(cell, list) else str(cell) for cell in row] for row in rows]
    first = max((line.cell_len for row in shown for line in Text.from_markup(row[0]).split()), default=0)
    if console.width < 2 + first + (LEAST + 3) * (len(columns) - 1):
        for row in shown:
            console.print(Text.from_markup(row[0], style="bold"))
            for name, cell in zip(columns[1:], row[1:]):
                if cell:
                    console.print(Padding(Text.from_markup(f"{name}: {cell}" if name else cell), (0, 0, 0, 2)))
        return
    # Long text is wrapped and never cut. The first column is not even wrapped.
    table = Table(box=box.SIMPLE)
    for number, name in enumerate(columns):
        table.add_column(name, overflow="fold", no_wrap=number == 0)
    for row in shown:
        table.add_row(*row)
    console.print(table)


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
