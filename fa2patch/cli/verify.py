"""``fa2patch verify``: does a model isolate the documents of a packed batch, without and with fa2patch?"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Union

import click
import torch

from .._types import Call, Model
from ..errors import BadBatch, Fa2PatchError
from ..patch.applying import apply
from ..proof.inputs import checked, example
from ..proof.result import Verification
from ..proof.verify import verify
from ..upstream import inspecting
from ..upstream.find_models import transformers_model
from .loading import loaded_or_tiny
from .models import ModelArgument
from .options import device, dtype, takes_model
from .output import Shown, Table, escaped, in_one_line, print_found

Found = Union[Verification, str]  # a verification, or the text of the error that kept it from being made

# This is why a model isolates documents without a cache only, with its attention implementation.
_WHY = (
    "Loaded as {}, this model looks for documents in position_ids only if the forward makes no cache. It makes one "
    "unless it is called with use_cache=False, because config.use_cache is True."
)


def _read_batch(context: click.Context, option: click.Parameter, file: Path | None) -> Call | None:
    if file is None:
        return None
    try:
        is_json = file.suffix == ".json"
        given = json.loads(file.read_text(encoding="utf-8")) if is_json else torch.load(file, weights_only=True)
        if isinstance(given, Mapping):
            batch = {str(name): torch.tensor(it) if isinstance(it, list) else it for name, it in given.items()}
            checked(batch, torch.device("cpu"))
            return batch
        wrong = f"holds a {type(given).__name__}"
    except BadBatch as error:
        raise click.BadParameter(f"{file.name}: {error}") from None
    except Exception as error:
        wrong = f"does not read: {in_one_line(error)}"
    raise click.BadParameter(
        "looked for a dict of tensors (torch.save) or of lists (.json) such as input_ids and position_ids, found "
        f"{file.name}, which {wrong}"
    )


@click.command("verify")
@click.option("--batch", type=click.Path(exists=True, dir_okay=False, path_type=Path), callback=_read_batch,
              help="A packed batch: JSON, or what torch.save wrote. Default: one row of four documents.")  # fmt: skip
@click.option("--max-documents", type=click.IntRange(1), help="Check this many documents of the batch only.")
@click.option("--dtype", type=dtype, default="float32", show_default=True, help="float32, bfloat16 or float16.")
@click.option("--device", type=device, default="cpu", show_default=True, help="Where the model is put: cpu, cuda.")
@click.option("--cache/--no-cache", default=None, help="Call with use_cache=True or False. Default: the model's.")
@takes_model
def verify_command(
    model: ModelArgument, batch: Call | None, max_documents: int | None, dtype: torch.dtype, device: torch.device,
    cache: bool | None, as_json: bool,
) -> None:  # fmt: skip
    """Verify that MODEL isolates the documents of a packed row, without and with fa2patch.

    MODEL is one of these, tried in this order: a config.json, or a folder that holds one; a model type of the installed
    Transformers (llama; bert:masked is BERT as an encoder); a name on the hub (org/name). The first line on stderr says
    which it was. The weights of a folder or of the hub are loaded. Otherwise a tiny model with large random weights is
    made. Transformers alone is checked with the cache that it makes by default, and without one.

    Exits with 0 if fa2patch isolates every document, with 1 if it does not or refuses the model, and with 2 if the
    arguments are wrong.
    """
    ready = loaded_or_tiny(model, dtype).to(device)
    call = {**(example(device, ready) if batch is None else batch), **({} if cache is None else {"use_cache": cache})}
    name, (default, without, why) = type(ready).__name__, verify_unpatched(ready, call, max_documents)
    try:
        apply(ready)  # it stays patched
        ours: Found = verify(ready, batch=call, strict=False, max_documents=max_documents)
    except Exception as error:
        # an error of other code is the batch's, which does not fit the model, if there is one without fa2patch too
        if not isinstance(error, Fa2PatchError) and not isinstance(default, str):
            raise
        ours = _as_text(error)
    both = {"alone": default, "alone_without_cache": without, "fa2patch": ours}
    shown = {key: {"error": it} if isinstance(it, str) else it.to_dict() for key, it in both.items() if it is not None}
    found = {"model": name, "checked": model.checked, "ok": is_isolated(ours), **shown, "why": why}
    print_found(found, as_json, _shown(name, default, without, why, ours))
    sys.exit(0 if is_isolated(ours) else 1)


class Unpatched(NamedTuple):
    by_default: Found  # without use_cache in the batch, the config decides
    without_cache: Found | None  # with use_cache=False; None if that is how the batch is computed anyway
    why: str  # why the two differ; empty if they do not


def verify_unpatched(model: Model, batch: Call, max_documents: int | None = None) -> Unpatched:
    # If the batch has use_cache, the model is verified only in that way.
    inner = transformers_model(model)
    by_default = verified(model, batch, max_documents)
    says_so = bool(getattr(inspecting.text_config(inner.config), "use_cache", False))
    if "use_cache" in batch or not says_so or not inspecting.takes(type(inner).forward, "use_cache"):
        return Unpatched(by_default, None, "")
    without = verified(model, {**batch, "use_cache": False}, max_documents)
    differ = is_isolated(without) and not is_isolated(by_default)
    implementation = getattr(inner.config, "_attn_implementation", None) or "it is"
    return Unpatched(by_default, without, _WHY.format(implementation) if differ else "")


def verified(model: Model, batch: Call, max_documents: int | None = None) -> Found:
    try:
        return verify(model, batch=batch, strict=False, max_documents=max_documents)
    except Exception as error:
        return _as_text(error)


def _as_text(error: Exception) -> str:
    # fa2patch's own errors are kept whole, others as one line.
    return f"{type(error).__name__}: {error}" if isinstance(error, Fa2PatchError) else in_one_line(error)


def is_isolated(found: Found | None) -> bool:
    return isinstance(found, Verification) and found.ok


def _shown(name: str, default: Found, without: Found | None, why: str, ours: Found) -> Shown:
    alone = f"{name}, Transformers alone"
    if without is None:
        yield from _one(alone, default)
    elif without == default:
        yield from _one(f"{alone}, with and without a cache", default)
    else:
        yield from _one(f"{alone}, with the cache that it makes by default", default)
        yield from _one(f"{alone}, without a cache (use_cache=False)", without)
    if why:
        yield f"Why they differ: {escaped(why)}\n"
    yield from _one(f"{name}, with fa2patch", ours)


def _one(title: str, found: Found) -> Shown:
    if isinstance(found, str):
        yield f"[bold]{title}[/bold]: {escaped(found, 'yellow')}\n"
        return
    where = [found.word, "row", "token", "length", *(["continues"] if found.word == "segment" else [])]
    rows = []
    for number, document in enumerate(found.documents, 1):
        cells = (number, document.row, document.start, document.length, document.parent or "-")[: len(where)]
        moved, gradient = _number(document.moved, found.moved_bound), _number(document.gradient, 0.0)
        rows.append((*cells, moved, gradient, _number(document.distance, found.distance_bound)))
    yield f"[bold]{title}[/bold]: {'[green]isolated[/green]' if found.ok else '[red]NOT ISOLATED[/red]'}"
    yield Table([*where, "changed by others", "gradient to others", "from alone"], rows)
    if found.reason:
        yield escaped(found.reason, "red")
    yield ""


def _number(value: float | None, bound: float) -> str:
    if value is None:
        return "-"
    return f"[{'green' if value <= bound else 'red'}]{'0' if value == 0 else f'{value:.1e}'}[/]"
