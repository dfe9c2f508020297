"""What ``apply`` would do to a model, layer by layer, from its config only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from . import kernels
from .patching import Site, plan, transformers_model
from .seams import layers


def on_meta(model: str, attn_implementation: str | None = None, trust_remote_code: bool = False) -> Any:
    """The causal LM of a config.json, a folder or a name on the hub, on the meta device: no weights, no memory.

    Raises:
        OSError, ValueError: Transformers' own, where there is no such config.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    path = Path(model)
    where = str(path.parent) if path.is_file() and path.name == "config.json" else model
    config = AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code)
    more = {"attn_implementation": attn_implementation} if attn_implementation else {}
    with torch.device("meta"):
        made: Any = AutoModelForCausalLM
        return made.from_config(config, trust_remote_code=trust_remote_code, **more)


def described(model: Any, kernel: str = "auto") -> dict[str, Any]:
    """What ``apply(model, kernel=kernel)`` would replace, as JSON can hold it; nothing is changed.

    Raises:
        Fa2PatchError: why ``apply`` would refuse the model.
    """
    inner = transformers_model(model)
    kernels.check_name(kernel)
    would = plan(inner, kernel)
    decoder = layers.models(inner)[-1]
    usable = [one.name for one in kernels.ORDER if one.available()[0]]
    found = []
    for layer in would.attention:
        module = decoder.get_submodule(layer.name)
        window = getattr(module, "sliding_window", None)
        found.append(
            {
                "name": layer.name,
                "class": type(module).__name__,
                "seam": layer.seam,
                "replaced": _named(layer.site),
                "window": window if isinstance(window, int) else None,
            }
        )
    of_layers = {layer.site for layer in would.attention}
    return {
        "model": type(inner).__name__,
        "model_type": str(getattr(decoder.config, "model_type", "")),
        "attn_implementation": str(getattr(inner.config, "_attn_implementation", None)),
        "kernel": kernel if kernel != "auto" else f"auto (here: {', '.join(usable)})",
        "layers": found,
        "besides": [_named(site) for site in would.sites if site not in of_layers],
    }


def _named(site: Site) -> str:
    owner, module = site.find()
    name = module.__name__.rpartition(".")[2]
    return f"{name}.{site.attribute}" if owner is module else f"{name}.{owner.__qualname__}.{site.attribute}"
