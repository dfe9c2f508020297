"""``fa2patch kernels`` and ``fa2patch architectures``."""

from __future__ import annotations

import json

import click

from .output import as_json_option, new_console, new_table, plain


@click.command()
@as_json_option
def kernels(as_json: bool) -> None:
    """Show the kernels in the order that "auto" tries them, what each can do, and whether it can run here."""
    from ..kernels import rows

    found = rows()
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    table = new_table("kernel", "what", "here", "dtypes", "head dim up to", "besides plain attention")
    for row in found:
        here = "[green]usable[/green]" if row["usable"] else f"[dim]{plain(row['reason'])}[/dim]"
        limits = (", ".join(row["dtypes"] or ["any"]), str(row["head_dim"] or "any"))
        table.add_row(row["name"], row["what"], here, *limits, ", ".join(row["here"] or row["features"]))
    new_console().print(table)


@click.command()
@as_json_option
def architectures(as_json: bool) -> None:
    """Show the registry: the model types that have a row. Other models are inspected when they are patched."""
    from ..upstream.architectures import architectures as rows

    words = {
        "refuse": "refuses what cannot be packed",
        "adjust": "adjusts attention's options",
        "queries": "scales queries",
    }
    quirks = {row.model_type: [name for name in words if getattr(row, name) is not None] for row in rows()}
    if as_json:
        click.echo(json.dumps(quirks))
        return
    table = new_table("model type", "what its row does")
    for model_type, names in quirks.items():
        table.add_row(model_type, ", ".join(words[name] for name in names) or "nothing special")
    new_console().print(table)
