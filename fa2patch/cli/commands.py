"""The ``fa2patch`` command and its subcommand ``run``. A command imports what it needs when it runs."""

from __future__ import annotations

from . import extras

try:
    import click
except ModuleNotFoundError as error:
    raise SystemExit(extras.advice(error)) from None

from .architectures import architectures
from .doctor import doctor
from .kernels import kernels
from .matrix import matrix
from .output import Commands
from .status import status
from .verify import verify


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="fa2patch")
def main() -> None:
    """Keep the examples of packed rows apart, in the Transformers version that you have."""


for command in (verify, doctor, status, kernels, architectures, matrix):
    main.add_command(command)


@main.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--kernel", default="auto", show_default=True, help="As for fa2patch.apply.")
@click.option("--collate", is_flag=True, help="Flatten what a Trainer's standard padding collators make for training.")
@click.option("--pack/--no-pack", default=True, help="Compute the padded batches of TRL's trainers packed.")
@click.option("--quiet", is_flag=True, help="Print only what is left as it is, each with the reason.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="SCRIPT|-m MODULE [ARGS]...")
def run(kernel: str, collate: bool, pack: bool, quiet: bool, command: tuple[str, ...]) -> None:
    """Run a script, a module or an installed command (trl sft ...) with every language model in it patched.

    A model that the script, or a Python that it starts, gets from from_pretrained or from_config is patched as it is
    made, and a line on stderr says so. So are models that a Trainer, its model_init or sentence-transformers make.
    Models that cannot be patched are named and left alone. Everything else is as
    with python SCRIPT. A Python of another environment inherits PYTHONPATH, but nothing is patched or imported there.
    With torchrun or accelerate: torchrun ... -m fa2patch run SCRIPT, or fa2patch run torchrun ...
    SCRIPT.
    """
    from ..errors import Fa2PatchError
    from ..run.start import RunOptions, start

    if command[0].startswith("-") and command[0] not in ("-m", "-"):
        raise click.NoSuchOption(command[0])
    try:
        start(command, RunOptions(kernel, collate, quiet, pack))
    except Fa2PatchError as error:
        raise click.UsageError(str(error)) from None
