"""``fa2patch doctor``: what this machine has, and what fa2patch makes of it."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import OutFile, as_json_option
from .output import escaped, new_console, new_table, print_json

if TYPE_CHECKING:
    from rich.console import Console


@click.command("doctor")
@click.option("--svg", type=OutFile(), help="Write the screen there as a picture.")
@as_json_option
def doctor_command(svg: Path | None, as_json: bool) -> None:
    """Show what is installed here and how it treats packed rows, tried on a tiny Llama.

    Exits with 0 if fa2patch isolates documents here, with 1 if it does not.
    """
    from .diagnosis import diagnose

    found = diagnose()
    if svg:
        svg.write_text(_picture(found), encoding="utf-8")
    if as_json:
        print_json(found)
    else:
        show_doctor(new_console(), found)
    sys.exit(0 if found["ok"] else 1)


def _picture(found: dict[str, Any]) -> str:
    """The screen as SVG in the reader's own monospace font, because rich's font would be fetched from the network."""
    from rich.console import Console

    console = Console(record=True, width=120, file=io.StringIO(), highlight=False)
    show_doctor(console, found)
    return re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="fa2patch doctor"), flags=re.DOTALL)


def show_doctor(console: Console, found: dict[str, Any]) -> None:
    """Print the findings of :func:`fa2patch.cli.diagnosis.diagnose` on one screen."""
    table = new_table("", "found", "")
    table.add_row("Python", found["python"], found["platform"])
    table.add_row("torch", found["torch"], ", ".join(found["gpus"]) or "no GPU")
    for name, package in found["packages"].items():
        version = package["version"] or "[dim]none[/dim]"
        problem = package["problem"] if package["version"] else ""
        table.add_row(name, version, f"[red]{escaped(problem)}[/red]" if problem else "")
    for kernel in found["kernels"]:
        able = "[green]usable[/green]" if kernel["usable"] else "[dim]not usable[/dim]"
        table.add_row(f"kernel {kernel['name']}", able, escaped(kernel["reason"]))
    table.add_row("seam of Llama", found["seam"] or "none", "others may differ: fa2patch status MODEL")
    for key, name in (
        ("alone", "alone, default cache"),
        ("alone_without_cache", "alone, use_cache=False"),
        ("patched", "with fa2patch"),
    ):
        state, reason = found[key]["state"], found[key].get("reason", "")
        colour = "green" if state == "isolated" else "red"
        table.add_row(name, f"[{colour}]{state}[/{colour}]", escaped(reason) or "one packed row, a tiny Llama")
    console.print(table)
    if found["why"]:
        console.print(f"[bold]One packed row, alone:[/bold] {escaped(found['why'])}")
    known = found["known"]
    if known:
        rows = ", ".join(f"{row} {right}" for row, right in known["rows"].items())
        console.print(
            f"[bold]Transformers {known['release']} alone[/bold], from the compat matrix, on its flash route, is "
            f"right in so many of {known['measured']} architectures: {rows}; in all of these {len(known['every_row'])}."
        )
        if known["leak"]:
            console.print(f"Even one plain row leaks in: {', '.join(known['leak'])}.")
    if found["defects"] and not known:
        console.print(f"Defects known up to {found['evidence_ends']}; whether this release has them was not checked:")
    for defect in found["defects"]:
        console.print(f"[yellow]•[/yellow] {escaped(defect)}")
    for advice in found["advice"]:
        console.print(f"[bold cyan]→[/bold cyan] {escaped(advice)}")
