"""``python -m fa2patch``."""

from .cli import main

main(prog_name="fa2patch")
