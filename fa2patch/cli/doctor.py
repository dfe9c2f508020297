"""``fa2patch doctor``: what this machine has, and what fa2patch makes of it."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import as_json_option, out_file
from .output import escaped, new_console, print_json, table_of

if TYPE_CHECKING:
    from rich.console import Console

_TRIED = {
    "alone": "alone, default cache",
    "alone_without_cache": "alone, use_cache=False",
    "patched": "with fa2patch",
}


@click.command("doctor")
@click.option("--svg", **out_file, help="Write the screen there as a picture.")
@as_json_option
def doctor_command(svg: Path | None, as_json: bool) -> None:
    """Show what is installed here and how it treats packed rows, tried on a tiny Llama.

    Exits with 0 if fa2patch isolates documents here, with 1 if it does not.
    """
    from rich.console import Console

    from .diagnosis import diagnose

    found = diagnose()
    if svg:
        console = Console(record=True, width=120, file=io.StringIO(), highlight=False)
        _show(console, found)
        picture = console.export_svg(title="fa2patch doctor")
        # the reader's own monospace font, because rich's font would be fetched from the network
        svg.write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL), encoding="utf-8")
    if as_json:
        print_json(found)
    else:
        _show(new_console(), found)
    sys.exit(0 if found["ok"] else 1)


def _show(console: Console, found: dict[str, Any]) -> None:
    console.print(table_of(("", "found", ""), _rows(found)))
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
    elif found["defects"]:
        console.print(f"Defects known up to {found['evidence_ends']}; whether this release has them was not checked:")
    for defect in found["defects"]:
        console.print(f"[yellow]•[/yellow] {escaped(defect)}")
    for advice in found["advice"]:
        console.print(f"[bold cyan]→[/bold cyan] {escaped(advice)}")


def _rows(found: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    yield "Python", found["python"], found["platform"]
    yield "torch", found["torch"], ", ".join(found["gpus"]) or "no GPU"
    for name, package in found["packages"].items():
        version, problem = package["version"], package["problem"]
        yield name, version or "[dim]none[/dim]", escaped(problem, "red") if version and problem else ""
    for kernel in found["kernels"]:
        able = "[green]usable[/green]" if kernel["usable"] else "[dim]not usable[/dim]"
        yield f"kernel {kernel['name']}", able, escaped(kernel["reason"])
    yield "seam of Llama", found["seam"] or "none", "others may differ: fa2patch status MODEL"
    for key, name in _TRIED.items():
        state, reason = found[key]["state"], found[key].get("reason")
        colour = "green" if state == "isolated" else "red"
        yield name, escaped(state, colour), escaped(reason or "one packed row, a tiny Llama")
