"""The commands that only look: ``fa2patch verify``, ``doctor``, ``status``, ``kernels`` and ``architectures``."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ..proof.verify import Verification

_json = click.option("--json", "as_json", is_flag=True, help="For machines: JSON on stdout.")
_remote = click.option("--trust-remote-code", is_flag=True, help="Run the modeling code that comes with the model.")
_attention = click.option(
    "--attn-implementation", metavar="A", help="eager, sdpa or flash_attention_2. Default: the model's."
)


@click.command()
@click.argument("model")
@click.option("--batch", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="A packed batch: JSON, or what torch.save wrote. Default: one row of four documents.")  # fmt: skip
@click.option("--max-documents", type=click.IntRange(1), help="Check this many documents of the batch only.")
@click.option("--dtype", default="float32", show_default=True, help="float32, bfloat16 or float16.")
@click.option("--device", default="cpu", show_default=True, help="Where the model is put: cpu, cuda.")
@click.option("--cache/--no-cache", default=None, help="Call with use_cache=True or False. Default: the model's.")
@_attention
@_remote
@_json
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

    from ..errors import Fa2PatchError
    from ..patch.applying import apply
    from ..probing.batches import example
    from ..proof.verify import verify as hold

    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise click.BadParameter(f"looked for float32, bfloat16 or float16, found {dtype!r}.", param_hint="--dtype")
    loaded = _loaded(model, kind, attn_implementation, trust_remote_code).to(device)
    given = _batch(batch) if batch else example(torch.device(device), loaded)
    if cache is not None:
        given["use_cache"] = cache
    found: dict[str, Verification | str] = {}
    for name in ("alone", "fa2patch"):
        try:
            if name == "fa2patch":
                apply(loaded)
            found[name] = hold(loaded, batch=given, strict=False, max_documents=max_documents)
        except Fa2PatchError as error:
            found[name] = f"{type(error).__name__}: {error}"
        except Exception as error:
            if name == "fa2patch":
                raise
            found[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    ours = found["fa2patch"]
    ok = not isinstance(ours, str) and ours.ok
    if as_json:
        shown = {name: {"error": it} if isinstance(it, str) else it.to_dict() for name, it in found.items()}
        click.echo(json.dumps({"model": type(loaded).__name__, "ok": ok, **shown}, indent=1))
    else:
        console = _console()
        for name, title in (("alone", "Transformers alone"), ("fa2patch", "with fa2patch")):
            _show_verification(console, f"{type(loaded).__name__}, {title}", found[name])
    sys.exit(0 if ok else 1)


def _loaded(model: str, dtype: Any, attention: str | None, trust: bool) -> Any:
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


def _tiny(model: str, dtype: Any, attention: str | None) -> Any:
    try:
        from compat_matrix import tiny_models
        from compat_matrix.user_models import matrix, models
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"a tiny model needs {error.name}, which is not installed: pip install 'fa2patch[cli]'"
        ) from None
    try:
        architecture = matrix.model(model).architecture
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
        console.print(f"[bold]{title}[/bold]: [yellow]{_plain(found)}[/yellow]\n")
        return
    state = "[green]isolated[/green]" if found.ok else "[red]NOT ISOLATED[/red]"
    table = _table("document", "row", "token", "length", "changed by others", "gradient to others", "from alone")
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
        console.print(f"[red]{_plain(found.reason)}[/red]")
    console.print()


def _number(value: float | None, bound: float) -> str:
    if value is None:
        return "-"
    return f"[{'green' if value <= bound else 'red'}]{'0' if value == 0 else f'{value:.1e}'}[/]"


@click.command()
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="Write the screen there as a picture.")
@_json
def doctor(svg: Path | None, as_json: bool) -> None:
    """Show what is installed here and how it treats packed rows, tried on a tiny Llama.

    Exits with 0 if fa2patch isolates documents here, with 1 if it does not.
    """
    from ..proof.doctor import examine

    found = examine()
    if svg:
        svg.write_text(_picture(found), encoding="utf-8")
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        show_doctor(_console(), found)
    sys.exit(0 if found["ok"] else 1)


def _picture(found: dict[str, Any]) -> str:
    """The screen as SVG in the reader's own monospace font, because rich's font would be fetched from the network."""
    import io

    from rich.console import Console

    console = Console(record=True, width=120, file=io.StringIO(), highlight=False)
    show_doctor(console, found)
    return re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="fa2patch doctor"), flags=re.DOTALL)


def show_doctor(console: Console, found: dict[str, Any]) -> None:
    """Print the findings of :func:`fa2patch.proof.doctor.examine` on one screen."""
    table = _table("", "found", "")
    table.add_row("Python", found["python"], found["platform"])
    table.add_row("torch", found["torch"], ", ".join(found["gpus"]) or "no GPU")
    for name, package in found["packages"].items():
        version = package["version"] or "[dim]none[/dim]"
        problem = package["problem"] if package["version"] else ""
        table.add_row(name, version, f"[red]{_plain(problem)}[/red]" if problem else "")
    for kernel in found["kernels"]:
        able = "[green]usable[/green]" if kernel["usable"] else "[dim]not usable[/dim]"
        table.add_row(f"kernel {kernel['name']}", able, _plain(kernel["reason"]))
    table.add_row("seam of Llama", found["seam"] or "none", "others may differ: fa2patch status MODEL")
    for key, name in (("alone", "one packed row, alone"), ("patched", "one packed row, fa2patch")):
        state, reason = found[key]["state"], found[key].get("reason", "")
        colour = "green" if state == "isolated" else "red"
        table.add_row(name, f"[{colour}]{state}[/{colour}]", _plain(reason) or "a tiny Llama, verified just now")
    console.print(table)
    known = found["known"]
    if known:
        rows = ", ".join(f"{row} {right}" for row, right in known["rows"].items())
        console.print(
            f"[bold]Transformers {known['release']} alone[/bold], from the compat matrix, is right in so many of "
            f"{known['measured']} architectures: {rows}; in all of these {len(known['every_row'])}."
        )
        if known["leak"]:
            console.print(f"Even one plain row leaks in: {', '.join(known['leak'])}.")
    for defect in found["defects"]:
        console.print(f"[yellow]•[/yellow] {_plain(defect)}")
    for advice in found["advice"]:
        console.print(f"[bold cyan]→[/bold cyan] {_plain(advice)}")


@click.command()
@click.argument("model")
@click.option("--kernel", default="auto", show_default=True, help="As for fa2patch.apply.")
@click.option("--dtype", help="The weights' dtype; default: what the config says, else bfloat16.")
@_attention
@_remote
@_json
def status(
    model: str, kernel: str, dtype: str | None, attn_implementation: str | None, trust_remote_code: bool, as_json: bool
) -> None:
    """Show what fa2patch.apply would do to MODEL, layer by layer, without doing it.

    MODEL is a config.json, a folder with one, or a model's name on the hub. No weights are read. Exits with 0 if the
    model would be patched, with 1 if it would be refused.
    """
    from ..errors import Fa2PatchError
    from ..proof.described import described, without_weights

    try:
        made, mode = without_weights(model, attn_implementation, trust_remote_code, dtype)
    except (OSError, ValueError) as error:
        raise click.BadParameter(
            f"looked for a config.json, a folder with one or a model of the hub, found {model!r}: {error}",
            param_hint="MODEL",
        ) from None
    try:
        found = described(made, mode, kernel)
    except Fa2PatchError as error:
        if as_json:
            click.echo(json.dumps({"model": type(made).__name__, "refused": f"{type(error).__name__}: {error}"}))
        else:
            _console().print(f"[bold]{type(made).__name__}[/bold]: [yellow]refused[/yellow]: {_plain(str(error))}")
        sys.exit(1)
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    console = _console()
    console.print(
        f"[bold]{found['model']}[/bold] ({found['model_type']}, loaded as {found['attn_implementation']}): would be "
        f"patched, and computed in {found['dtype']} on {found['device']}"
    )
    table = _table("layers", "class", "seam", "replaced", "window", "kernel")
    for group in _grouped(found["layers"]):
        first = group[0]
        name = first["name"] + (f" … {group[-1]['name']}" if len(group) > 1 else "")
        window, computed = str(first["window"] or "-"), first["kernel"] or "?"
        table.add_row(name, first["class"], first["seam"], first["replaced"], window, computed)
    console.print(table)
    for why in dict.fromkeys(layer["why"] for layer in found["layers"] if layer["why"]):
        console.print(f"Passed over: {_plain(why)}.")
    if found["problem"]:
        console.print(f"Further layers cannot be told without weights: {_plain(found['problem'])}")
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


@click.command()
@_json
def kernels(as_json: bool) -> None:
    """Show the kernels in the order that "auto" tries them, what each can do, and whether it can run here."""
    from ..kernels import rows

    found = rows()
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    table = _table("kernel", "what", "here", "dtypes", "head dim up to", "besides plain attention")
    for row in found:
        here = "[green]usable[/green]" if row["usable"] else f"[dim]{_plain(row['reason'])}[/dim]"
        limits = (", ".join(row["dtypes"] or ["any"]), str(row["head_dim"] or "any"))
        table.add_row(row["name"], row["what"], here, *limits, ", ".join(row["here"] or row["features"]))
    _console().print(table)


@click.command()
@_json
def architectures(as_json: bool) -> None:
    """Show the registry: the model types that have a row. Other models are inspected when they are patched."""
    from ..upstream.architectures import architectures as rows

    quirks = {
        row.model_type: [name for name in ("refuse", "adjust", "queries") if getattr(row, name) is not None]
        for row in rows()
    }
    if as_json:
        click.echo(json.dumps(quirks))
        return
    table = _table("model type", "what its row does")
    words = {
        "refuse": "refuses what cannot be packed",
        "adjust": "adjusts attention's options",
        "queries": "scales queries",
    }
    for model_type, names in quirks.items():
        table.add_row(model_type, ", ".join(words[name] for name in names) or "nothing special")
    _console().print(table)


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    return Table(*columns, box=box.SIMPLE)


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _console() -> Console:
    import os

    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", "120")), highlight=False)
