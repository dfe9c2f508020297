"""The ``fa2patch`` command, and its subcommands ``kernels`` and ``run``. None imports Transformers before it runs."""

from __future__ import annotations

from typing import Any

from . import NEEDED, advice

try:
    import click
except ModuleNotFoundError as error:
    raise SystemExit(advice(error)) from None

from ..errors import Fa2PatchError
from ..kernels import kernel_rows
from ..run.start import RunOptions, start
from .doctor import doctor_command
from .matrix import matrix_command
from .options import as_json_option
from .output import escaped, new_console, print_json, table_of
from .planning import plan_command
from .status import status_command
from .supported import architectures_command
from .verifying import verify_command


class Commands(click.Group):
    """A group of commands that names the extra to install if a command lacks one of its packages."""

    def invoke(self, context: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(context)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in NEEDED:
                raise
            raise click.ClickException(advice(error)) from None


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="fa2patch")
def main() -> None:
    """Keep the examples of packed rows apart, in the Transformers version that you have."""


for command in (
    verify_command, doctor_command, status_command, architectures_command, matrix_command, plan_command,
):  # fmt: skip
    main.add_command(command)


@main.command("kernels")
@as_json_option
def kernels_command(as_json: bool) -> None:
    """Show the kernels in the order that "auto" tries them, what each can do, and whether it can run here."""
    found, rows = kernel_rows(), []
    if as_json:
        print_json(found)
        return
    for row in found:
        here = "[green]usable[/green]" if row["usable"] else escaped(row["reason"], "dim")
        limits = (", ".join(row["dtypes"] or ["any"]), str(row["head_dim"] or "any"))
        rows.append((row["name"], row["what"], here, *limits, ", ".join(row["here"] or row["features"])))
    columns = ("kernel", "what", "here", "dtypes", "head dim up to", "besides plain attention")
    new_console().print(table_of(columns, rows))


@main.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--kernel", default="auto", show_default=True, help="As for fa2patch.apply.")
@click.option("--collate", is_flag=True, help="Flatten what a Trainer's standard padding collators make for training.")
@click.option("--pack/--no-pack", default=True, help="Compute the padded batches of TRL's trainers packed.")
@click.option(
    "--max-tokens", type=click.IntRange(1), help="Compute each batch of a Trainer in passes of so many tokens."
)
@click.option("--quiet", is_flag=True, help="Print only what is left as it is, each with the reason.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="SCRIPT|-m MODULE [ARGS]...")
def run_command(
    kernel: str, collate: bool, pack: bool, max_tokens: int | None, quiet: bool, command: tuple[str, ...]
) -> None:
    """Run a script, a module or an installed command (trl sft ...) with every language model in it patched.

    A model that the script, or a Python that it starts, gets from from_pretrained or from_config is patched as it is
    made, and a line on stderr says so. So are models that a Trainer, its model_init or sentence-transformers make.
    Models that cannot be patched are named and left alone. Everything else is as
    with python SCRIPT. A Python of another environment inherits PYTHONPATH, but nothing is patched or imported there.
    With torchrun or accelerate: torchrun ... -m fa2patch run SCRIPT, or fa2patch run torchrun ...
    SCRIPT.
    """
    if command[0].startswith("-") and command[0] not in ("-m", "-"):
        raise click.NoSuchOption(command[0])
    try:
        start(command, RunOptions(kernel, collate, quiet, pack, max_tokens))
    except Fa2PatchError as error:
        raise click.UsageError(str(error)) from None
