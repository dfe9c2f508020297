"""``fa2patch status``: what ``apply`` would do to a model, layer by layer, from its config only."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from typing import Any

import click
import torch

from .. import entry_points
from .._types import Model
from ..documents.boundaries import Boundaries
from ..errors import Fa2PatchError
from ..kernels import Asked, Kernel, Picks, pick
from ..patch.applying import apply
from ..patch.state import Patch
from ..upstream.facts import Site
from ..upstream.find_models import models, transformers_model
from ..upstream.packed_mask import PackedMask
from .loading import Refused, fake
from .models import ModelArgument
from .options import dtype, kernel, takes_model
from .output import Shown, Table, escaped, in_one_line, print_found


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
    made = fake(model, dtype)
    try:
        found = _preview(made, kernel)
    except Fa2PatchError as error:
        raise Refused(model, made, str(error), refused=f"{type(error).__name__}: {error}") from None
    found = {"checked": model.checked, **found}
    print_found(found, as_json, _shown(found))


def _shown(found: dict[str, Any]) -> Shown:
    yield (
        f"[bold]{found['model']}[/bold] ({found['model_type']}, loaded as {found['attn_implementation']}): would be "
        f"patched, and computed in {found['dtype']} on {found['device']}"
    )
    rows = []
    for _, same in groupby(found["layers"], lambda layer: {**layer, "name": ""}):
        first, *others = same
        name = first["name"] + (f"\n… {others[-1]['name']}" if others else "")
        what = (first["class"], first["seam"], first["replaced"])
        rows.append((name, *what, first["window"] or "-", first["kernel"] or "?"))
    yield Table(("layers", "class", "seam", "replaced", "window", "kernel"), rows)
    for why in dict.fromkeys(layer["why"] for layer in found["layers"] if layer["why"]):
        yield f"Passed over: {escaped(why)}."
    if found["problem"]:
        yield f"Further layers cannot be told without weights: {escaped(found['problem'])}"
    yield f"Besides: {', '.join(found['besides'])}."
    for one in found["added"]:
        yield f"Added by {escaped(one['package'])}: the {one['kind']} {escaped(one['name'])}."


def _preview(model: Model, kernel: str) -> dict[str, Any]:
    # The model has fake tensors. The result is JSON-compatible.
    inner = transformers_model(model)
    device, found = "cuda" if torch.cuda.is_available() else "cpu", []
    with apply(inner, kernel=kernel) as patch:
        of_stacks = patch.stacks or (patch,)
        problem = next(filter(None, [_rehearse(one, device) for one in of_stacks]), "")
        sites = [layer.site for one in of_stacks for layer in one.attention]
        decoder = models(inner)[-1]
        for layer, site in zip(patch.layers, sites):
            module = (inner if patch.stacks else decoder).get_submodule(layer.name)
            window = getattr(module, "sliding_window", None)
            found.append(
                {
                    "name": layer.name,
                    "class": type(module).__name__,
                    "seam": layer.seam,
                    "replaced": _named(site),
                    "window": window if isinstance(window, int) else None,
                    "kernel": layer.kernel,
                    "why": layer.why,
                }
            )
        every = dict.fromkeys(site for one in (patch, *patch.stacks) for site in one.plan.sites)
        besides = [_named(site) for site in every if site not in sites]
    return {
        "model": type(inner).__name__,
        "model_type": str(getattr(decoder.config, "model_type", "")),
        "attn_implementation": str(getattr(inner.config, "_attn_implementation", None)),
        "kernel": kernel,
        "device": device,
        "dtype": str(next(inner.parameters()).dtype).replace("torch.", ""),
        "layers": found,
        "besides": besides,
        "added": [asdict(one) for one in entry_points.added()],
        "problem": problem,
    }


class _Nothing(Kernel):
    name = "nothing"
    MULTIPLE = 1

    def available(self) -> tuple[bool, str]:
        return True, ""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *unused: Any) -> torch.Tensor:
        return q.new_empty(*q.shape[:2], v.shape[2])


class _Rehearsal(Picks):
    # It records the kernel of each layer on a type of device, and computes nothing.

    def __init__(self, name: str | Kernel, device: str) -> None:
        super().__init__(name)
        self.device = device

    def __call__(self, module: torch.nn.Module | None, asked: Asked, device: torch.device) -> Kernel:
        asked = asked._replace(device=self.device)
        if module is not None:
            self.took(module, pick(self.given or self.name, asked, device, try_it=False))
        return _Nothing()


def _rehearse(patch: Patch, device: str) -> str:
    # A packed batch shows the patch which kernel each layer gets. The result is the error that kept the forward from
    # further layers. Some models read tensor values, such as a mixture's routing, and fake tensors have none.
    patch.picks = _Rehearsal(patch.picks.given or patch.kernel, device)
    decoder, shape = models(patch.model)[-1], (1, 8)
    ids = torch.zeros(shape, dtype=torch.int64)
    documents = Boundaries(torch.tensor([0, 3, 8], dtype=torch.int32), 5, 5, (3, 5))
    mask = PackedMask(documents, patch.picks, shape, 5, ids, patch.facts)
    weight: Any = next(patch.model.parameters())
    try:
        with weight.fake_mode, torch.no_grad():
            decoder(input_ids=ids, position_ids=ids, attention_mask=mask, use_cache=patch.facts.keeps_cache)
    except Fa2PatchError:
        raise
    except Exception as error:
        return in_one_line(error)
    return ""


def _named(site: Site) -> str:
    owner, module = site.owner, site.module
    name = module.__name__.rpartition(".")[2]
    return f"{name}.{site.attribute}" if owner is module else f"{name}.{owner.__qualname__}.{site.attribute}"
