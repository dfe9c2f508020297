"""``fa2patch verify``: does a model isolate the documents of a packed batch?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .loading import Refused, loaded_or_tiny
from .models import resolve
from .options import as_json_option, attention_option, device, dtype, pretrained_option, remote_option
from .output import escaped, new_console, new_table, print_json, print_refusal

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from .diagnosis import Found, Unpatched


@click.command("verify")
@click.argument("model")
@click.option("--batch", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="A packed batch: JSON, or what torch.save wrote. Default: one row of four documents.")  # fmt: skip
@click.option("--max-documents", type=click.IntRange(1), help="Check this many documents of the batch only.")
@click.option("--dtype", type=dtype, default="float32", show_default=True, help="float32, bfloat16 or float16.")
@click.option("--device", type=device, default="cpu", show_default=True, help="Where the model is put: cpu, cuda.")
@click.option("--cache/--no-cache", default=None, help="Call with use_cache=True or False. Default: the model's.")
@pretrained_option
@attention_option
@remote_option
@as_json_option
def verify_command(
    model: str,
    batch: Path | None,
    max_documents: int | None,
    dtype: torch.dtype,
    device: torch.device,
    cache: bool | None,
    pretrained: bool,
    attn_implementation: str | None,
    trust_remote_code: bool,
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

    given = _batch(batch) if batch else None
    found = resolve(model, pretrained)
    try:
        ready, then = loaded_or_tiny(found, dtype, attn_implementation, trust_remote_code)
    except Refused as refused:
        said = found.said(refused.then)
        click.echo(said, err=True)
        if as_json:
            print_json({"model": refused.model, "checked": said, "ok": False, "fa2patch": {"error": str(refused)}})
        else:
            print_refusal(refused.model, refused)
        sys.exit(1)
    said = found.said(then)
    click.echo(said, err=True)
    ready = ready.to(device)
    call = {**(example(device, ready) if given is None else given), **({} if cache is None else {"use_cache": cache})}
    unpatched = verify_unpatched(ready, call, max_documents)
    ours = _patched(ready, call, max_documents, unpatched)
    ok = is_isolated(ours)
    if as_json:
        both = {"alone": unpatched.by_default, "alone_without_cache": unpatched.without_cache, "fa2patch": ours}
        shown = {key: _as_json(it) for key, it in both.items() if it is not None}
        about = {"model": type(ready).__name__, "checked": said, "ok": ok}
        print_json({**about, **shown, "why": unpatched.why})
    else:
        _show(type(ready).__name__, unpatched, ours)
    sys.exit(0 if ok else 1)


def _show(name: str, unpatched: Unpatched, ours: Found) -> None:
    console = new_console()
    _show_unpatched(console, name, unpatched)
    _show_verification(console, f"{name}, with fa2patch", ours)


def _patched(model: Any, batch: dict[str, Any], documents: int | None, unpatched: Unpatched) -> Found:
    """The verification of a model with fa2patch, or its error as text. The model is patched then."""
    from ..errors import Fa2PatchError
    from ..patch.applying import apply
    from ..proof.verify import verify as hold

    try:
        apply(model)
        return hold(model, batch=batch, strict=False, max_documents=documents)
    except Fa2PatchError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        if not isinstance(unpatched.by_default, str):
            raise
        return f"{type(error).__name__}: {error}".splitlines()[0]  # the batch does not fit the model


def _as_json(found: Found) -> dict[str, Any]:
    return {"error": found} if isinstance(found, str) else found.to_dict()


def _show_unpatched(console: Console, name: str, unpatched: Unpatched) -> None:
    title = f"{name}, Transformers alone"
    if unpatched.without_cache is None or unpatched.without_cache == unpatched.by_default:
        both = "" if unpatched.without_cache is None else ", with and without a cache"
        _show_verification(console, title + both, unpatched.by_default)
        return
    _show_verification(console, f"{title}, with the cache that it makes by default", unpatched.by_default)
    _show_verification(console, f"{title}, without a cache (use_cache=False)", unpatched.without_cache)
    if unpatched.why:
        console.print(f"Why they differ: {unpatched.why}\n", markup=False)


def _batch(file: Path) -> dict[str, Any]:
    import torch

    try:
        if file.suffix == ".json":
            given = json.loads(file.read_text(encoding="utf-8"))
            return {name: torch.tensor(value) if isinstance(value, list) else value for name, value in given.items()}
        return dict(torch.load(file, weights_only=True))
    except Exception as error:
        raise click.BadParameter(
            f"looked for a dict of tensors (torch.save) or of lists (.json) such as input_ids and position_ids, found "
            f"{file.name}, which does not read: {error}",
            param_hint="--batch",
        ) from None


def _show_verification(console: Console, title: str, found: Found) -> None:
    if isinstance(found, str):
        console.print(f"[bold]{title}[/bold]: [yellow]{escaped(found)}[/yellow]\n")
        return
    state = "[green]isolated[/green]" if found.ok else "[red]NOT ISOLATED[/red]"
    of_tree = ["continues"] if found.word == "segment" else []
    where = (found.word, "row", "token", "length", *of_tree)
    table = new_table(*where, "changed by others", "gradient to others", "from alone")
    for number, document in enumerate(found.documents, 1):
        cells = (number, document.row, document.start, document.length, document.parent or "-")
        table.add_row(
            *(str(cell) for cell in cells[: len(where)]),
            _number(document.moved, found.moved_bound),
            _number(document.gradient, 0.0),
            _number(document.distance, found.distance_bound),
        )
    console.print(f"[bold]{title}[/bold]: {state}")
    console.print(table)
    if found.reason:
        console.print(f"[red]{escaped(found.reason)}[/red]")
    console.print()


def _number(value: float | None, bound: float) -> str:
    if value is None:
        return "-"
    return f"[{'green' if value <= bound else 'red'}]{'0' if value == 0 else f'{value:.1e}'}[/]"
