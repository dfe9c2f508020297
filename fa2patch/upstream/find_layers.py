"""Find the attention layers of a decoder, and the seam through which each can be replaced."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .._types import Function, Model
from . import find_masks, inspecting
from .facts import Site, of_forward
from .find_models import models, text_modules
from .inspecting import is_of_model
from .seams import formula, interface, mixer


@dataclass(frozen=True)
class Layer:
    """A layer that must be replaced for packed rows: an attention layer or a mixer.

    Attributes:
        name: the layer's name in the decoder.
        seam: ``"interface"`` or ``"formula"`` for an attention layer, ``"mixer"`` for a mixer; ``"document"`` for an
            attention layer whose base model computes each document by itself.
        site: the attribute through which the layer is given the boundaries.
        others: more attributes that this seam needs replaced.
        module: the layer. A plan drops it, because the patch is copied with its model.
        by_itself: whether the layer's class computes attention by itself, as most encoders' do, and follows the mask.
    """

    name: str
    seam: str
    site: Site
    others: tuple[Site, ...] = ()
    module: Any = field(default=None, compare=False, repr=False)
    by_itself: bool = False

    @property
    def fused(self) -> bool:
        """Whether the layer's function takes query, key and value in one tensor (ModernBERT up to 5.0)."""
        if self.site.make is not formula.routed_table:
            return False
        return formula.is_fused(vars(self.site.owner)[self.site.attribute][formula.EAGER])


def attention_layers(decoder: Model) -> Iterator[Layer]:
    """Yield every attention layer of a decoder that offers a seam."""
    seams: dict[type, Layer | None] = {}
    layers = []
    for name, module in text_modules(decoder):
        cls = type(module)
        if cls not in seams:
            seams[cls] = _seam_of(module)
        found = seams[cls]
        if found is not None:
            layers.append(replace(found, name=name, module=module))
    if layers and (find_masks.of_the_user(decoder) or any(_only_by_document(layer, decoder) for layer in layers)):
        site = of_forward(decoder, _as_it_is)
        layers = [replace(layer, seam="document", site=site, others=()) for layer in layers]
    yield from layers


def _only_by_document(layer: Layer, decoder: Model) -> bool:
    """Whether no kernel can compute what a layer does: more than a mask says, or attention of the user's own."""
    if layer.by_itself and formula.says_more(layer.module):
        return True
    modeling = inspecting.defining(type(layer.module), "forward").__module__
    config = getattr(layer.module, "config", None) or getattr(decoder, "config", None)
    functions = _of_dense_batches(layer, getattr(config, "_attn_implementation", None))
    return not all(is_of_model(function, modeling) for function in functions if function is not None)


def _of_dense_batches(layer: Layer, implementation: str | None) -> Iterator[Any]:
    """The functions that compute a layer's attention in a dense batch, and the ``forward`` that computes packed ones.

    None stands for one that is missing.
    """
    owner, attribute = layer.site.owner, layer.site.attribute
    if implementation == "sdpa":
        yield torch.nn.functional.scaled_dot_product_attention
    if layer.seam == "interface":
        table = getattr(owner, attribute)
        yield table[implementation] if implementation in table else getattr(owner, interface.EAGER, None)
    elif attribute != "forward":
        yield getattr(owner, attribute).get(implementation)
    else:
        yield getattr(owner, attribute)
        if isinstance(layer.site.make, formula.ByFormula):
            plain, flash = layer.site.make.classes
            yield inspecting.forward_of(plain)
            yield None if flash is None else inspecting.forward_of(flash)  # it says which layers have a window
        if implementation == formula.FLASH:
            yield vars(layer.site.module).get("_flash_attention_forward")


def _as_it_is(original: Function) -> Function:
    """The forward of a base model is replaced for every patched model."""
    return original


def _seam_of(module: torch.nn.Module) -> Layer | None:
    """The seam of a module's class, as of a layer without a name; None if it has none."""
    cls = type(module)
    if inspecting.is_of_torch(cls):
        return None
    home = sys.modules.get(inspecting.defining(cls, "forward").__module__)
    if home is None:
        return None
    looked_up = interface.interface_of(home, inspecting.forward_of(cls))
    if looked_up is not None:
        return Layer("", "interface", *looked_up)
    site = formula.formula_of(home, module)
    if site is None:
        return None
    return Layer(
        "", "formula", site, by_itself=isinstance(site.make, formula.ByFormula) and site.make.classes[1] is None
    )


def claims_flash_attention(model: Model, found: Iterable[Layer]) -> bool:
    """Whether a model declares flash attention support, or its attention layers have flash code of their own."""
    said = any(
        getattr(part, name, False)
        for part in models(model)
        for name in ("_supports_flash_attn", "_supports_flash_attn_2")
    )
    return said or any(layer.seam != "interface" for layer in found)


def blocks_without(decoder: Model, found: list[Layer]) -> dict[str, str]:
    """Return blocks without attention or a mixer whose siblings have one, as names and class names.

    Blocks are the members of the module lists that hold the found layers. Blocks that take no mask and are not called
    attention are left out. If no layer was found, the members of all module lists are returned.
    """
    holding: dict[str, set[str]] = {}
    for layer in found:
        parts = layer.name.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if at is not None:
            holding.setdefault(".".join(parts[:at]), set()).add(parts[at])
    if not found:
        lists = (name for name, module in text_modules(decoder) if isinstance(module, torch.nn.ModuleList))
        holding = {name: set() for name in lists}
    return {
        f"{name}.{index}": type(block).__name__
        for name, indices in holding.items()
        for index, block in decoder.get_submodule(name).named_children()
        if index not in indices and (not found or _may_look_around(block))
    }


def _may_look_around(block: torch.nn.Module) -> bool:
    """Whether a block has a part that takes a mask or is called attention. Nemotron-H has blocks with an MLP only."""
    if "attention" in type(block).__name__.lower():
        return True
    inside = {type(module) for module in block.modules() if module is not block}
    return any(
        "attention" in cls.__name__.lower() or mixer.takes_mask(cls.forward)
        for cls in inside
        if not inspecting.is_of_torch(cls)
    )
