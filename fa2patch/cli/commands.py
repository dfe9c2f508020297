"""The ``fa2patch`` command. A subcommand is imported when it is called, so that version and help come at once."""

from __future__ import annotations

import codecs
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

# Commands need these packages beyond fa2patch's own requirements: the extra `cli`.
NEEDED = ("click", "packaging", "rich", "tomli", "uv")
ADVICE = (
    "fa2patch's command line needs {}, which is not installed: pip install 'fa2patch[cli]' "
    "(in a clone: pip install -e '.[cli]')"
)

try:
    import click
except ModuleNotFoundError as error:
    raise SystemExit(ADVICE.format(error.name)) from None

# The subcommands, each with its line in the list of commands. The module of this name has it as NAME_command.
COMMANDS = {
    "verify": "Verify that a model isolates the documents of a packed row.",
    "doctor": "Show what is installed here and how it treats packed rows.",
    "status": "Show what fa2patch.apply would do to a model, layer by layer.",
    "architectures": "Show which models fa2patch isolates in the installed Transformers.",
    "matrix": "Check your own models in the Transformers releases that you use.",
    "plan": "Compare padding, packing and a budget of tokens on a dataset.",
    "kernels": "Show the kernels that compute attention, and which can run here.",
    "run": "Run a script or a command with every language model in it patched.",
}


class Commands(click.Group):
    # Commands are imported when they are called. Errors about packages and streams are one line.

    def list_commands(self, context: click.Context) -> list[str]:
        return [*COMMANDS]

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f".{name}", __package__), f"{name}_command")
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        # The list is written without an import of the commands.
        with formatter.section("Commands"):
            formatter.write_dl([*COMMANDS.items()])

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in NEEDED:
                raise
            raise click.ClickException(ADVICE.format(error.name)) from None

    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> Any:
        # What cannot be read or written is one line on stderr, and the exit code 2. Nobody wishes to read a closed
        # stream, so what is written there is dropped.
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is None:  # Python found the descriptor closed
                setattr(sys, name, _dropped())
            elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
                stream.reconfigure(errors="fa2patch")
        try:
            return super().main(args, *rest, **options)
        except OSError as error:  # click itself ends quietly where a pipe is closed
            if error.errno is None:
                raise
            what = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else "the output"
            click.echo(f"Error: {what}: {os.strerror(error.errno)}", err=True)
            sys.stdout = _dropped()  # Python flushes it at the end, which would fail again
            sys.exit(2)


# Where the encoding of stdout lacks a character that commands print, this stands for it. Others become a question mark.
PLAIN = {"…": "...", "█": "#", "•": "*", "→": "->", "µ": "u"}


def _in_plain_characters(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lost = error.object[error.start : error.end]
    return "".join(PLAIN.get(character, "?") for character in lost), error.end


codecs.register_error("fa2patch", _in_plain_characters)


def _dropped() -> io.TextIOWrapper:
    return open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - as long as the process


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="fa2patch")
def main() -> None:
    """Keep the examples of packed rows apart, in the Transformers version that you have."""
