"""``fa2patch verify``: does a model isolate the documents of a packed batch?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .loading import loaded_or_tiny
from .models import ModelArgument
from .options import device, dtype, takes_model
from .output import escaped, new_console, print_json, table_of

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from .diagnosis import Found, Unpatched


def _read_batch(context: click.Context, option: click.Parameter, file: Path | None) -> dict[str, Any] | None:
    if file is None:
        return None
    import torch

    try:
        if file.suffix == ".json":
            given = json.loads(file.read_text(encoding="utf-8"))
            return {name: torch.tensor(value) if isinstance(value, list) else value for name, value in given.items()}
        return dict(torch.load(file, weights_only=True))
    except Exception as error:
        raise click.BadParameter(
            f"looked for a dict of tensors (torch.save) or of lists (.json) such as input_ids and position_ids, found "
            f"{file.name}, which does not read: {error}"
        ) from None


@click.command("verify")
@click.option("--batch", type=click.Path(exists=True, dir_okay=False, path_type=Path), callback=_read_batch,
              help="A packed batch: JSON, or what torch.save wrote. Default: one row of four documents.")  # fmt: skip
@click.option("--max-documents", type=click.IntRange(1), help="Check this many documents of the batch only.")
@click.option("--dtype", type=dtype, default="float32", show_default=True, help="float32, bfloat16 or float16.")
@click.option("--device", type=device, default="cpu", show_default=True, help="Where the model is put: cpu, cuda.")
@click.option("--cache/--no-cache", default=None, help="Call with use_cache=True or False. Default: the model's.")
@takes_model
def verify_command(
    model: ModelArgument,
    batch: dict[str, Any] | None,
    max_documents: int | None,
    dtype: torch.dtype,
    device: torch.device,
    cache: bool | None,
    as_json: bool,
) -> None:
    """Verify that MODEL isolates the documents of a packed row, without and with fa2patch.

    MODEL is one of these, tried in this order: a config.json, or a folder that holds one; a model type of the installed
    Transformers (llama; bert:masked is BERT as an encoder); a name on the hub (org/name). The first line on stderr says
    which it was. The weights of a folder or of the hub are loaded. Otherwise a tiny model with large random weights is
    made. Transformers alone is checked with the cache that it makes by default, and without one.

    Exits with 0 if fa2patch isolates every document, with 1 if it does not or refuses the model, and with 2 if the
    arguments are wrong.
    """
    from ..proof.inputs import example
    from .diagnosis import is_isolated, verify_unpatched

    ready = loaded_or_tiny(model, dtype).to(device)
    call = {**(example(device, ready) if batch is None else batch), **({} if cache is None else {"use_cache": cache})}
    unpatched = verify_unpatched(ready, call, max_documents)
    ours, name = _patched(ready, call, max_documents, unpatched), type(ready).__name__
    ok = is_isolated(ours)
    if as_json:
        both = {"alone": unpatched.by_default, "alone_without_cache": unpatched.without_cache, "fa2patch": ours}
        shown = {key: _as_json(it) for key, it in both.items() if it is not None}
        print_json({"model": name, "checked": model.checked, "ok": ok, **shown, "why": unpatched.why})
    else:
        console = new_console()
        _show_unpatched(console, name, unpatched)
        _show(console, f"{name}, with fa2patch", ours)
    sys.exit(0 if ok else 1)


def _patched(model: Any, batch: dict[str, Any], documents: int | None, unpatched: Unpatched) -> Found:
    """The verification of a model with fa2patch, or its error as text. The model is patched then."""
    from ..errors import Fa2PatchError
    from ..patch.applying import apply
    from ..proof.verify import verify
    from .diagnosis import as_text

    try:
        apply(model)
        return verify(model, batch=batch, strict=False, max_documents=documents)
    except Exception as error:
        # an error of other code is the batch's, which does not fit the model, if there is one without fa2patch too
        if isinstance(error, Fa2PatchError) or isinstance(unpatched.by_default, str):
            return as_text(error)
        raise


def _as_json(found: Found) -> dict[str, Any]:
    return {"error": found} if isinstance(found, str) else found.to_dict()


def _show_unpatched(console: Console, name: str, unpatched: Unpatched) -> None:
    title, default, without = f"{name}, Transformers alone", unpatched.by_default, unpatched.without_cache
    if without is None:
        _show(console, title, default)
    elif without == default:
        _show(console, f"{title}, with and without a cache", default)
    else:
        _show(console, f"{title}, with the cache that it makes by default", default)
        _show(console, f"{title}, without a cache (use_cache=False)", without)
        if unpatched.why:
            console.print(f"Why they differ: {unpatched.why}\n", markup=False)


def _show(console: Console, title: str, found: Found) -> None:
    if isinstance(found, str):
        console.print(f"[bold]{title}[/bold]: {escaped(found, 'yellow')}\n")
        return
    where = [found.word, "row", "token", "length", *(["continues"] if found.word == "segment" else [])]
    rows = []
    for number, document in enumerate(found.documents, 1):
        cells = (number, document.row, document.start, document.length, document.parent or "-")
        values = (
            _number(document.moved, found.moved_bound),
            _number(document.gradient, 0.0),
            _number(document.distance, found.distance_bound),
        )
        rows.append([*(str(cell) for cell in cells[: len(where)]), *values])
    console.print(f"[bold]{title}[/bold]: {'[green]isolated[/green]' if found.ok else '[red]NOT ISOLATED[/red]'}")
    console.print(table_of([*where, "changed by others", "gradient to others", "from alone"], rows))
    if found.reason:
        console.print(escaped(found.reason, "red"))
    console.print()


def _number(value: float | None, bound: float) -> str:
    if value is None:
        return "-"
    return f"[{'green' if value <= bound else 'red'}]{'0' if value == 0 else f'{value:.1e}'}[/]"
