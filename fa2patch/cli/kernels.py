"""``fa2patch kernels``."""

from __future__ import annotations

import json

import click

from .output import as_json_option, new_console, new_table, plain


@click.command()
@as_json_option
def kernels(as_json: bool) -> None:
    """Show the kernels in the order that "auto" tries them, what each can do, and whether it can run here."""
    from ..kernels import kernel_rows

    found = kernel_rows()
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    table = new_table("kernel", "what", "here", "dtypes", "head dim up to", "besides plain attention")
    for row in found:
        here = "[green]usable[/green]" if row["usable"] else f"[dim]{plain(row['reason'])}[/dim]"
        limits = (", ".join(row["dtypes"] or ["any"]), str(row["head_dim"] or "any"))
        table.add_row(row["name"], row["what"], here, *limits, ", ".join(row["here"] or row["features"]))
    new_console().print(table)
