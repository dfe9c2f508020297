"""``fa2patch status``: what ``apply`` would replace in a model, and which kernels would compute it."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from .loading import Refused, fake
from .models import ModelArgument
from .options import dtype, kernel, takes_model
from .output import escaped, new_console, print_json, table_of

if TYPE_CHECKING:
    import torch


@click.command("status")
@click.option("--kernel", type=kernel, metavar="NAME", default="auto", show_default=True, help="As for fa2patch.apply.")
@click.option("--dtype", type=dtype, metavar="NAME",
              help="The weights' dtype; default: what the config says, else bfloat16.")  # fmt: skip
@takes_model
def status_command(model: ModelArgument, kernel: str, dtype: torch.dtype | None, as_json: bool) -> None:
    """Show what fa2patch.apply would do to MODEL, layer by layer, without doing it.

    MODEL is one of these, tried in this order: a config.json, or a folder that holds one; a model type of the installed
    Transformers (llama; bert:masked is BERT as an encoder); a name on the hub (org/name). The first line on stderr says
    which it was. No weights are read. Exits with 0 if the model would be patched, with 1 if it would be refused, and
    with 2 if the arguments are wrong.
    """
    from ..errors import Fa2PatchError
    from .preview import preview

    made = fake(model, dtype)
    try:
        found = preview(made, kernel)
    except Fa2PatchError as error:
        raise Refused(model, made, str(error), refused=f"{type(error).__name__}: {error}") from None
    if as_json:
        print_json({"checked": model.checked, **found})
    else:
        _show(found)


def _show(found: dict[str, Any]) -> None:
    console, rows = new_console(), []
    console.print(
        f"[bold]{found['model']}[/bold] ({found['model_type']}, loaded as {found['attn_implementation']}): would be "
        f"patched, and computed in {found['dtype']} on {found['device']}"
    )
    for _, same in groupby(found["layers"], lambda layer: {**layer, "name": ""}):
        first, *others = same
        name = first["name"] + (f"\n… {others[-1]['name']}" if others else "")
        window, computed = str(first["window"] or "-"), first["kernel"] or "?"
        rows.append((name, first["class"], first["seam"], first["replaced"], window, computed))
    console.print(table_of(("layers", "class", "seam", "replaced", "window", "kernel"), rows))
    for why in dict.fromkeys(layer["why"] for layer in found["layers"] if layer["why"]):
        console.print(f"Passed over: {escaped(why)}.")
    if found["problem"]:
        console.print(f"Further layers cannot be told without weights: {escaped(found['problem'])}")
    console.print(f"Besides: {', '.join(found['besides'])}.")
