"""How commands print: JSON, tables, errors as one line, and progress."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Callable

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def print_json(found: object) -> None:
    """Print JSON on stdout."""
    click.echo(json.dumps(found, indent=1))


def new_console() -> Console:
    """A console on stdout, as wide as the terminal, or ``COLUMNS`` wide where there is none."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", "120")), highlight=False)


def table_of(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table. Long text is wrapped and never cut; the first column is not even wrapped."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    for number, name in enumerate(columns):
        table.add_column(name, overflow="fold", no_wrap=number == 0)
    for row in rows:
        table.add_row(*row)
    return table


def escaped(text: object, style: str = "") -> str:
    """Text whose square brackets rich prints as they are, in a style."""
    from rich.markup import escape

    return f"[{style}]{escape(str(text))}[/]" if style else escape(str(text))


def in_one_line(error: BaseException) -> str:
    """An error's class and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


@contextlib.contextmanager
def progress_of(names: Sequence[str]) -> Iterator[Callable[..., None]]:
    """A context with ``show(name, what, ended=False)``, which shows the progress of a name; threads may call it."""
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
