"""``fa2patch kernels``: what computes attention here."""

from __future__ import annotations

from typing import Any

import click

from ..kernels import kernel_rows
from ..kernels.devices import device_rows
from .options import as_json_option
from .output import Shown, Table, escaped, print_found


@click.command("kernels")
@as_json_option
def kernels_command(as_json: bool) -> None:
    """Show the kernels in the order that "auto" tries them, what each can do, and whether it can run here.

    A second table says for each kind of device which kernels may run there, and what is missing.
    """
    found = kernel_rows()
    print_found(found, as_json, _shown(found))


def _shown(found: list[dict[str, Any]]) -> Shown:
    usable = [row["name"] for row in found if row["usable"]]
    yield f"[bold green]Can run here, best first:[/bold green] {', '.join(usable)}."
    rows = []
    for row in found:
        here = "[green]usable[/green]" if row["usable"] else escaped(row["reason"], "dim")
        does = row["here"] or row["features"]
        rows.append((row["name"], row["what"], here, row["dtypes"] or "any", row["head_dim"] or "any", does))
    yield Table(("kernel", "what", "here", "dtypes", "head dim up to", "besides plain attention"), rows)
    devices = ((row["name"], row["kernels"], row["missing"]) for row in device_rows())
    yield Table(("device", "kernels", "missing there"), devices)
