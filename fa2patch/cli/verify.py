"""``fa2patch verify``: does a model isolate the documents of a packed batch?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .compat import compat
from .output import as_json_option, attention_option, new_console, new_table, plain, remote_option

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from ..proof.result import Verification


@click.command()
@click.argument("model")
@click.option("--batch", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="A packed batch: JSON, or what torch.save wrote. Default: one row of four documents.")  # fmt: skip
@click.option("--max-documents", type=click.IntRange(1), help="Check this many documents of the batch only.")
@click.option("--dtype", default="float32", show_default=True, help="float32, bfloat16 or float16.")
@click.option("--device", default="cpu", show_default=True, help="Where the model is put: cpu, cuda.")
@click.option("--cache/--no-cache", default=None, help="Call with use_cache=True or False. Default: the model's.")
@attention_option
@remote_option
@as_json_option
def verify(
    model: str,
    batch: Path | None,
    max_documents: int | None,
    dtype: str,
    device: str,
    cache: bool | None,
    attn_implementation: str | None,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    """Verify that MODEL isolates the documents of a packed row, without and with fa2patch.

    MODEL is a folder with weights or a model's name on the hub, which is loaded as it is; or it is a config.json, a
    folder with one, or an architecture's name (llama), for which a tiny model with large random weights is made. Exits
    with 0 if fa2patch isolates every document, with 1 if it does not or refuses the model, and with 2 if the arguments
    are wrong.
    """
    import torch

    from ..probing.batches import example

    loaded = _loaded(model, _dtype(dtype), attn_implementation, trust_remote_code).to(device)
    given = _batch(batch) if batch else example(torch.device(device), loaded)
    if cache is not None:
        given["use_cache"] = cache
    found = _alone_and_patched(loaded, given, max_documents)
    ours = found["fa2patch"]
    ok = not isinstance(ours, str) and ours.ok
    if as_json:
        shown = {name: {"error": it} if isinstance(it, str) else it.to_dict() for name, it in found.items()}
        click.echo(json.dumps({"model": type(loaded).__name__, "ok": ok, **shown}, indent=1))
    else:
        console = new_console()
        for name, title in (("alone", "Transformers alone"), ("fa2patch", "with fa2patch")):
            _show_verification(console, f"{type(loaded).__name__}, {title}", found[name])
    sys.exit(0 if ok else 1)


def _alone_and_patched(model: Any, batch: dict[str, Any], documents: int | None) -> dict[str, Verification | str]:
    """The verification of a model, or its error as text, without fa2patch and with it. The model is patched then."""
    from ..errors import Fa2PatchError
    from ..patch.applying import apply
    from ..proof.verify import verify as hold

    found: dict[str, Verification | str] = {}
    for name in ("alone", "fa2patch"):
        try:
            if name == "fa2patch":
                apply(model)
            found[name] = hold(model, batch=batch, strict=False, max_documents=documents)
        except Fa2PatchError as error:
            found[name] = f"{type(error).__name__}: {error}"
        except Exception as error:
            if name == "fa2patch":
                raise
            found[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found


def _dtype(name: str) -> torch.dtype:
    import torch

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise click.BadParameter(f"looked for float32, bfloat16 or float16, found {name!r}.", param_hint="--dtype")
    return found


def _loaded(model: str, dtype: torch.dtype, attention: str | None, trust: bool) -> Any:
    path = Path(model)
    weights = path.is_dir() and any(any(path.glob(f"*.{end}")) for end in ("safetensors", "bin"))
    named = not path.exists() and "/" in model
    if not (weights or named):
        return _tiny(model, dtype, attention)
    from transformers import AutoModelForCausalLM

    more = {"attn_implementation": attention} if attention else {}
    try:
        return AutoModelForCausalLM.from_pretrained(model, torch_dtype=dtype, trust_remote_code=trust, **more)
    except Exception as error:
        raise click.ClickException(
            f"looked for a folder with weights, a config.json, an architecture's name or a model of the hub, found "
            f"{model!r}, which does not load: {error}"
        ) from None


def _tiny(model: str, dtype: torch.dtype, attention: str | None) -> Any:
    tiny_models, models = compat("tiny_models"), compat("user_models.models")
    try:
        architecture = compat("user_models.matrix").model(model).architecture
        if not tiny_models.is_present(architecture):
            raise models.BadConfig(f"the installed Transformers has no causal LM {model!r}.")
        return tiny_models.build(architecture, attention or "sdpa", dtype)
    except models.BadConfig as error:
        raise click.BadParameter(str(error), param_hint="MODEL") from None


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


def _show_verification(console: Console, title: str, found: Verification | str) -> None:
    if isinstance(found, str):
        console.print(f"[bold]{title}[/bold]: [yellow]{plain(found)}[/yellow]\n")
        return
    state = "[green]isolated[/green]" if found.ok else "[red]NOT ISOLATED[/red]"
    table = new_table("document", "row", "token", "length", "changed by others", "gradient to others", "from alone")
    for number, document in enumerate(found.documents, 1):
        table.add_row(
            *(str(cell) for cell in (number, document.row, document.start, document.length)),
            _number(document.moved, found.moved_bound),
            _number(document.gradient, 0.0),
            _number(document.distance, found.distance_bound),
        )
    console.print(f"[bold]{title}[/bold]: {state}")
    console.print(table)
    if found.reason:
        console.print(f"[red]{plain(found.reason)}[/red]")
    console.print()


def _number(value: float | None, bound: float) -> str:
    if value is None:
        return "-"
    return f"[{'green' if value <= bound else 'red'}]{'0' if value == 0 else f'{value:.1e}'}[/]"
