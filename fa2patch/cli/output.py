"""What the commands share: their group, options, and where and how they print."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

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


def new_table(*columns: str) -> Table:
    """An empty table with these columns."""
    from rich import box
    from rich.table import Table

    return Table(*columns, box=box.SIMPLE)


def plain(text: str) -> str:
    """Text whose square brackets rich prints as they are."""
    from rich.markup import escape

    return escape(text)


def new_console() -> Console:
    """A console on stdout, as wide as the terminal, or ``COLUMNS`` wide where there is none."""
    import os

    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", "120")), highlight=False)
