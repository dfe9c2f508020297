"""What the commands share: their group, options, where and how they print, and how they show progress."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from . import extras

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

as_json_option = click.option("--json", "as_json", is_flag=True, help="For machines: JSON on stdout.")
remote_option = click.option(
    "--trust-remote-code", is_flag=True, help="Run the modeling code that comes with the model."
)
attention_option = click.option(
    "--attn-implementation", metavar="A", help="eager, sdpa or flash_attention_2. Default: the model's."
)


class Commands(click.Group):
    """A group of commands that names the extra to install if a command lacks one of its packages."""

    def invoke(self, context: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(context)
        except ModuleNotFoundError as error:
            if not extras.is_needed(error):
                raise
            raise click.ClickException(extras.advice(error)) from None


class OutFile(click.Path):
    """A file to write, whose folder must exist; checked before anything takes time."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path.

        Raises:
            click.BadParameter: Its folder does not exist.
        """
        path = Path(str(super().convert(value, param, ctx)))
        if not path.parent.is_dir():
            self.fail(f"looked for the folder {str(path.parent)!r} to write {path.name!r} to, found none.", param, ctx)
        return path


def new_table(*columns: str) -> Table:
    """An empty table with these columns. Long text is wrapped and never cut; the first column is not even wrapped."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    for number, name in enumerate(columns):
        table.add_column(name, overflow="fold", no_wrap=number == 0)
    return table


def plain(text: str) -> str:
    """Text whose square brackets rich prints as they are."""
    from rich.markup import escape

    return escape(text)


def new_console() -> Console:
    """A console on stdout, as wide as the terminal, or ``COLUMNS`` wide where there is none."""
    import os

    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", "120")), highlight=False)


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
