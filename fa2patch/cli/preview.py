"""What ``apply`` would do to a model, layer by layer, from its config only."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

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

_AUTO = (
    "AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForVision2Seq", "AutoModelForMaskedLM",
    "AutoModelForSeq2SeqLM", "AutoModel",
)  # fmt: skip
"""Transformers' auto classes, in the order in which a config's class is looked for. Not every version has all."""


def class_of(config: Any, masked: bool = False, trust_remote_code: bool = False) -> Any:
    """The class that makes a model from a config: the one that the config names, else an auto class that knows it.

    Args:
        config: A Transformers config.
        masked: Whether the masked-LM class is wanted, where a model type has a causal one too.
        trust_remote_code: Whether the config's own modeling code may be used.
    """
    transformers = importlib.import_module("transformers")
    if trust_remote_code and getattr(config, "auto_map", None):
        return transformers.AutoModelForCausalLM
    for name in () if masked else getattr(config, "architectures", None) or ():
        if hasattr(getattr(transformers, name, None), "from_pretrained"):
            return getattr(transformers, name)
    names = ("AutoModelForMaskedLM", *_AUTO) if masked else _AUTO
    for auto in (getattr(transformers, name, None) for name in names):
        if auto is not None and type(config) in auto._model_mapping:
            return auto
    raise ValueError(f"Transformers {transformers.__version__} has no model class for {type(config).__name__}")


def without_weights(
    config: Any,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    dtype: torch.dtype | None = None,
    masked: bool = False,
) -> tuple[Model, FakeTensorMode]:
    """Build a model from its config with fake tensors, which need no weights and no memory.

    It is in eval mode, and the mode that its fake tensors belong to comes with it. Without a dtype, its weights have
    the config's, else bfloat16.
    """
    cls = class_of(config, masked, trust_remote_code)
    said = vars(config).get("dtype") or vars(config).get("torch_dtype") or "bfloat16"
    wanted = dtype or getattr(torch, str(said).replace("torch.", ""))
    config.dtype = wanted  # 5.x reads it here; earlier versions use torch's default dtype
    more = {"attn_implementation": attn_implementation} if attn_implementation else {}
    before, mode = torch.get_default_dtype(), FakeTensorMode(allow_non_fake_inputs=True)
    torch.set_default_dtype(wanted)
    try:
        with mode, _without_initialization():
            if hasattr(cls, "_model_mapping"):
                made = cls.from_config(config, trust_remote_code=trust_remote_code, **more)
            else:
                made = cls._from_config(config, **more)
            return made.eval(), mode
    finally:
        torch.set_default_dtype(before)


def _without_initialization() -> contextlib.AbstractContextManager[Any]:
    """Transformers' context in which weights are not filled: some ways of filling them look at values."""
    for name in ("initialization", "modeling_utils"):  # the first one from 5.0 on
        with contextlib.suppress(ImportError, AttributeError):
            found: Any = importlib.import_module(f"transformers.{name}").no_init_weights
            return found()  # type: ignore[no-any-return]
    return contextlib.nullcontext()


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


def rehearsed(patch: Patch, mode: FakeTensorMode, device: str) -> tuple[dict[str, Pick], str]:
    """Run a packed batch through a patched model of fake tensors and record the kernel of each layer.

    Returns the pick of each layer that the forward reached, by the layer's name, and the error that kept it from the
    others (else empty). Some models read tensor values, such as a mixture's routing, and fake tensors have none.
    """
    decoder, picks, shape = models(patch.model)[-1], Rehearsal(patch.picks.given or patch.kernel, device), (1, 8)
    ids, problem = torch.zeros(shape, dtype=torch.int64), ""
    documents = Boundaries(torch.tensor([0, 3, 8], dtype=torch.int32), 5, 5, (3, 5))
    mask = PackedMask(documents, picks, shape, 5, ids, patch.facts)
    try:
        with mode, torch.no_grad():
            decoder(input_ids=ids, position_ids=ids, attention_mask=mask, use_cache=patch.facts.keeps_cache)
    except Fa2PatchError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
    found = {layer.name: picks.picked.get(id(decoder.get_submodule(layer.name))) for layer in patch.attention}
    return {name: picked for name, picked in found.items() if picked is not None}, problem


def preview(model: Model, mode: FakeTensorMode, kernel: str = "auto") -> dict[str, Any]:
    """Describe, as JSON-compatible data, what ``apply(model, kernel=kernel)`` would replace and which kernels it uses.

    Args:
        model, mode: The results of :func:`without_weights`.

    Raises:
        Fa2PatchError: ``apply`` refuses the model, or the named kernel cannot compute one of its layers.
    """
    inner = transformers_model(model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    decoder = models(inner)[-1]
    with apply(inner, kernel=kernel) as patch:
        picked, problem = rehearsed(patch, mode, device)
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
