"""``fa2patch kernels``: what computes attention here."""

from __future__ import annotations

import click

from ..kernels import kernel_rows
from ..kernels.devices import device_rows
from .options import as_json_option
from .output import escaped, new_console, print_json, table_of


@click.command("kernels")
@as_json_option
def kernels_command(as_json: bool) -> None:
    """Show the kernels in the order that "auto" tries them, what each can do, and whether it can run here.

    A second table says for each kind of device which kernels may run there, and what is missing.
    """
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
    devices = [(row["name"], ", ".join(row["kernels"]), row["missing"]) for row in device_rows()]
    new_console().print(table_of(("device", "kernels", "missing there"), devices))
