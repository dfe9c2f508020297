"""What ``apply`` would do to a model, layer by layer, from its config only."""

from __future__ import annotations

from typing import Any

import torch

from .._types import Model
from ..documents.boundaries import Boundaries
from ..errors import Fa2PatchError
from ..kernels import Asked, Kernel, Pick, Picks, pick
from ..patch.applying import apply
from ..patch.state import Patch
from ..upstream.facts import Site
from ..upstream.find_layers import Layer
from ..upstream.find_models import models, transformers_model
from ..upstream.packed_mask import PackedMask
from .output import in_one_line


class _Nothing(Kernel):
    name = "nothing"
    MULTIPLE = 1

    def available(self) -> tuple[bool, str]:
        return True, ""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *unused: Any) -> torch.Tensor:
        return q.new_empty(*q.shape[:2], v.shape[2])


class Rehearsal(Picks):
    """Picks that record each layer's kernel on a type of device, by the ``id`` of its module, and compute nothing."""

    def __init__(self, name: str | Kernel, device: str) -> None:
        super().__init__(name)
        self.device = device
        self.picked: dict[int, Pick] = {}

    def __call__(self, module: torch.nn.Module | None, asked: Asked, device: torch.device) -> Kernel:
        asked = asked._replace(device=self.device)
        self.picked[id(module)] = pick(self.given or self.name, asked, device, try_it=False)
        return _Nothing()


def rehearsed(patch: Patch, device: str) -> tuple[dict[str, Pick], str]:
    """Run a packed batch through a patched model of fake tensors and record the kernel of each layer.

    Returns the pick of each layer that the forward reached, by the layer's name, and the error that kept it from the
    others (else empty). Some models read tensor values, such as a mixture's routing, and fake tensors have none.
    """
    decoder, picks, shape = models(patch.model)[-1], Rehearsal(patch.picks.given or patch.kernel, device), (1, 8)
    ids, problem = torch.zeros(shape, dtype=torch.int64), ""
    documents = Boundaries(torch.tensor([0, 3, 8], dtype=torch.int32), 5, 5, (3, 5))
    mask = PackedMask(documents, picks, shape, 5, ids, patch.facts)
    weight: Any = next(patch.model.parameters())
    try:
        with weight.fake_mode, torch.no_grad():
            decoder(input_ids=ids, position_ids=ids, attention_mask=mask, use_cache=patch.facts.keeps_cache)
    except Fa2PatchError:
        raise
    except Exception as error:
        problem = in_one_line(error)
    found = {layer.name: picks.picked.get(id(decoder.get_submodule(layer.name))) for layer in patch.attention}
    return {name: picked for name, picked in found.items() if picked is not None}, problem


def preview(model: Model, kernel: str) -> dict[str, Any]:
    """Describe, as JSON-compatible data, what ``apply`` would replace in a model of fake tensors, and its kernels.

    Raises:
        Fa2PatchError: ``apply`` refuses the model, or the named kernel cannot compute one of its layers.
    """
    inner = transformers_model(model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    decoder = models(inner)[-1]
    with apply(inner, kernel=kernel) as patch:
        picked, problem = rehearsed(patch, device)
        found = [_layer(layer, decoder.get_submodule(layer.name), picked.get(layer.name)) for layer in patch.attention]
        of_layers = {layer.site for layer in patch.attention}
        besides = [_named(site) for site in patch.plan.sites if site not in of_layers]
    return {
        "model": type(inner).__name__,
        "model_type": str(getattr(decoder.config, "model_type", "")),
        "attn_implementation": str(getattr(inner.config, "_attn_implementation", None)),
        "kernel": kernel,
        "device": device,
        "dtype": str(next(inner.parameters()).dtype).replace("torch.", ""),
        "layers": found,
        "besides": besides,
        "problem": problem,
    }


def _layer(layer: Layer, module: torch.nn.Module, picked: Pick | None) -> dict[str, Any]:
    window = getattr(module, "sliding_window", None)
    return {
        "name": layer.name,
        "class": type(module).__name__,
        "seam": layer.seam,
        "replaced": _named(layer.site),
        "window": window if isinstance(window, int) else None,
        "kernel": picked.kernel.name if picked else None,
        "why": picked.why if picked else "",
    }


def _named(site: Site) -> str:
    owner, module = site.owner, site.module
    name = module.__name__.rpartition(".")[2]
    return f"{name}.{site.attribute}" if owner is module else f"{name}.{owner.__qualname__}.{site.attribute}"
