"""``fa2patch run``: start a script or a command with its models patched. This process imports no torch."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

import click

from ..errors import Fa2PatchError
from ..run.start import RunOptions, start


@click.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--kernel", default="auto", show_default=True, help="As for fa2patch.apply.")
@click.option("--collate", is_flag=True, help="Flatten what a Trainer's standard padding collators make for training.")
@click.option("--padded-batches", is_flag=True, help="Compute padded batches packed, in every loop.")
@click.option("--pack/--no-pack", default=True, help="Compute the padded batches of TRL's trainers packed.")
@click.option(
    "--max-tokens", type=click.IntRange(1), help="Compute each batch of a Trainer in passes of so many tokens."
)
@click.option("--quiet", is_flag=True, help="Print only what is left as it is, each with the reason.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="SCRIPT|-m MODULE [ARGS]...")
@click.pass_context
def run_command(context: click.Context, /, command: tuple[str, ...], **options: Any) -> None:
    """Run a script, a module or an installed command (trl sft ...) with every language model in it patched.

    A model that the script, or a Python that it starts, gets from from_pretrained or from_config is patched as it is
    made, and a line on stderr says so. So are models that a Trainer, its model_init or sentence-transformers make.
    Models that cannot be patched are named and left alone. Everything else is as
    with python SCRIPT. A Python of another environment inherits PYTHONPATH, but nothing is patched or imported there.
    With torchrun or accelerate: torchrun ... -m fa2patch run SCRIPT, or fa2patch run torchrun ...
    SCRIPT.
    """
    if command[0].startswith("-") and command[0] not in ("-m", "-"):
        given = command[0].partition("=")[0]
        known = [name for option in context.command.params for name in (*option.opts, *option.secondary_opts)]
        close = get_close_matches(given, [name for name in known if name.startswith("--")])
        raise click.NoSuchOption(given, possibilities=close, ctx=context)
    try:
        start(command, RunOptions(**options))
    except Fa2PatchError as error:
        raise click.UsageError(str(error)) from None
