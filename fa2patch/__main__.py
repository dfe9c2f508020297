"""``python -m fa2patch``."""

from .cli.commands import main

main(prog_name="fa2patch")
