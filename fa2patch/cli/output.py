"""Where and how commands print, and how they show progress."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

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


def new_table(*columns: str) -> Table:
    """An empty table with these columns. Long text is wrapped and never cut; the first column is not even wrapped."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    for number, name in enumerate(columns):
        table.add_column(name, overflow="fold", no_wrap=number == 0)
    return table


def escaped(text: str) -> str:
    """Text whose square brackets rich prints as they are."""
    from rich.markup import escape

    return escape(text)


def print_refusal(model: str, reason: object) -> None:
    """Print that a model is refused, and why."""
    new_console().print(f"[bold]{model}[/bold]: [yellow]refused[/yellow]: {escaped(str(reason))}")


class Progress(Protocol):
    """Shows what is being done for one of the names."""

    def __call__(self, name: str, what: str, ended: bool = False) -> None:
        """Show ``what``; ``ended`` says that nothing follows for this name."""


@contextlib.contextmanager
def progress_of(names: Sequence[str]) -> Iterator[Progress]:
    """A context that shows the progress of several pieces of work, which may run in threads."""
    if not sys.stderr.isatty():
        yield lambda name, what, ended=False: click.echo(f"{name}: {what}", err=True)
        return
    from rich import progress
    from rich.console import Console

    columns: Any = (
        progress.SpinnerColumn(),
        progress.TextColumn("{task.description}", markup=False),
        progress.TimeElapsedColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True)) as bars:
        tasks = {name: bars.add_task(f"{name}: waits", total=1, start=False) for name in names}

        def show(name: str, what: str, ended: bool = False) -> None:
            bars.start_task(tasks[name])
            bars.update(tasks[name], description=f"{name}: {what}", completed=int(ended))

        yield show
