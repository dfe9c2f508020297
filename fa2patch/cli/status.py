"""``fa2patch status``: what ``apply`` would replace in a model, and which kernels would compute it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from .loading import fake
from .models import resolve
from .options import as_json_option, attention_option, dtype, kernel, pretrained_option, remote_option
from .output import escaped, new_console, new_table, print_json, print_refusal

if TYPE_CHECKING:
    import torch


@click.command("status")
@click.argument("model")
@click.option("--kernel", type=kernel, metavar="NAME", default="auto", show_default=True, help="As for fa2patch.apply.")
@click.option(
    "--dtype", type=dtype, metavar="NAME", help="The weights' dtype; default: what the config says, else bfloat16."
)
@pretrained_option
@attention_option
@remote_option
@as_json_option
def status_command(
    model: str,
    kernel: str,
    dtype: torch.dtype | None,
    pretrained: bool,
    attn_implementation: str | None,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    """Show what fa2patch.apply would do to MODEL, layer by layer, without doing it.

    MODEL is one of these, tried in this order: a config.json, or a folder that holds one; a model type of the installed
    Transformers (llama; bert:masked is BERT as an encoder); a name on the hub (org/name). The first line on stderr says
    which it was. No weights are read. Exits with 0 if the model would be patched, with 1 if it would be refused, and
    with 2 if the arguments are wrong.
    """
    from ..errors import Fa2PatchError
    from .preview import preview

    argument = resolve(model, pretrained)
    (made, mode), then = fake(argument, attn_implementation, trust_remote_code, dtype)
    said = argument.said(then)
    click.echo(said, err=True)
    try:
        found = preview(made, mode, kernel)
    except Fa2PatchError as error:
        name = type(made).__name__
        if as_json:
            print_json({"model": name, "checked": said, "refused": f"{type(error).__name__}: {error}"})
        else:
            print_refusal(name, error)
        sys.exit(1)
    if as_json:
        print_json({"checked": said, **found})
    else:
        _show_layers(found)


def _show_layers(found: dict[str, Any]) -> None:
    console = new_console()
    console.print(
        f"[bold]{found['model']}[/bold] ({found['model_type']}, loaded as {found['attn_implementation']}): would be "
        f"patched, and computed in {found['dtype']} on {found['device']}"
    )
    table = new_table("layers", "class", "seam", "replaced", "window", "kernel")
    for group in _grouped(found["layers"]):
        first = group[0]
        name = first["name"] + (f"\n… {group[-1]['name']}" if len(group) > 1 else "")
        window, computed = str(first["window"] or "-"), first["kernel"] or "?"
        table.add_row(name, first["class"], first["seam"], first["replaced"], window, computed)
    console.print(table)
    for why in dict.fromkeys(layer["why"] for layer in found["layers"] if layer["why"]):
        console.print(f"Passed over: {escaped(why)}.")
    if found["problem"]:
        console.print(f"Further layers cannot be told without weights: {escaped(found['problem'])}")
    console.print(f"Besides: {', '.join(found['besides'])}.")


def _grouped(layers: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Group consecutive layers that differ in their name only."""
    groups: list[list[dict[str, Any]]] = []
    for layer in layers:
        if groups and {**groups[-1][-1], "name": ""} == {**layer, "name": ""}:
            groups[-1].append(layer)
        else:
            groups.append([layer])
    return groups
