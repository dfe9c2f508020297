"""Progress of work that takes minutes, on stderr: a line that changes on a terminal, else a line for each step."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Protocol

import click


class Shows(Protocol):
    """Shows what is being done for one of the names."""

    def __call__(self, name: str, what: str, ended: bool = False) -> None:
        """Show ``what``; ``ended`` says that nothing follows for this name."""


@contextlib.contextmanager
def shown(names: Sequence[str]) -> Iterator[Shows]:
    """A context that shows the progress of several pieces of work, which may run in threads."""
    if not sys.stderr.isatty():
        yield lambda name, what, ended=False: click.echo(f"{name}: {what}", err=True)
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        tasks = {name: progress.add_task(f"{name}: waits", total=1, start=False) for name in names}

        def show(name: str, what: str, ended: bool = False) -> None:
            progress.start_task(tasks[name])
            progress.update(tasks[name], description=f"{name}: {what}", completed=int(ended))

        yield show
