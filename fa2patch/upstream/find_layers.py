"""Find the attention layers of a decoder, and the seam through which each can be replaced."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from .._types import Function, Model
from . import find_masks, inspecting
from .facts import Site, of_forward
from .find_models import models, text_modules
from .inspecting import is_of_model
from .seams import formula, function, fused, interface, method, mixer


@dataclass(frozen=True)
class Layer:
    """A layer that must be replaced for packed rows: an attention layer or a mixer.

    Attributes:
        name: the layer's name in the decoder.
        seam: ``"interface"``, ``"function"``, ``"method"`` or ``"formula"`` for an attention layer, ``"mixer"`` for a
            mixer; ``"document"`` for an attention layer whose base model computes each document by itself.
        site: the attribute through which the layer is given the boundaries.
        others: more attributes that this seam needs replaced.
        module: the layer. A plan drops it, because the patch is copied with its model.
        of_class: the seam that its class offers, if the layer goes document by document for another reason.
    """

    name: str
    seam: str
    site: Site
    others: tuple[Site, ...] = ()
    module: Any = field(default=None, compare=False, repr=False)
    of_class: str = ""

    @property
    def by_itself(self) -> bool:
        """Whether the layer's class computes attention by itself, as most encoders' do, and follows the mask."""
        return (self.of_class or self.seam) in ("formula", "document")

    @property
    def fused(self) -> bool:
        """Whether the layer's function takes query, key and value in one tensor (ModernBERT up to 5.0)."""
        if self.site.make is not function.routed_table:
            return False
        return fused.is_fused(vars(self.site.owner)[self.site.attribute][function.FLASH])


Seam = tuple[str, Site, tuple[Site, ...]]
"""The seam's name, the attribute that is replaced, and more attributes that the seam needs replaced."""


def attention_layers(decoder: Model) -> Iterator[Layer]:
    """Yield every attention layer of a decoder that offers a seam."""
    seams: dict[type, Seam | None] = {}
    layers = []
    for name, module in text_modules(decoder):
        cls = type(module)
        if cls not in seams:
            seams[cls] = _seam_of(module)
        found = seams[cls]
        if found is not None:
            layers.append(Layer(name, *found, module=module))
    if layers and (find_masks.of_the_user(decoder) or any(_only_by_document(layer, decoder) for layer in layers)):
        site = of_forward(decoder, _as_it_is)
        layers = [Layer(layer.name, "document", site, module=layer.module, of_class=layer.seam) for layer in layers]
    yield from layers


def _only_by_document(layer: Layer, decoder: Model) -> bool:
    """Whether no kernel can compute what a layer does: more than a mask says, or attention of the user's own."""
    if layer.seam == "formula" and formula.says_more(layer.module):
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
        if isinstance(layer.site.make, method.OnFlashClass):
            yield inspecting.forward_of(layer.site.make.flash)
        if implementation == function.FLASH:
            yield from (getattr(each.owner, function.NAME, None) for each in (layer.site, *layer.others))


def _as_it_is(original: Function) -> Function:
    """The forward of a base model is replaced for every patched model."""
    return original


def _seam_of(module: torch.nn.Module) -> Seam | None:
    """The seam of a module's class, or None."""
    cls = type(module)
    if inspecting.is_of_torch(cls):
        return None
    owner = inspecting.defining(cls, "forward")
    home = sys.modules.get(owner.__module__)
    if home is None:
        return None
    flash, forward = method.flash_class(home, cls), inspecting.forward_of(cls)
    table = function.table_name(home, forward)
    if table is not None:
        fuses = fused.is_fused(vars(home)[table][function.FLASH])
        others = () if fuses else (Site(home, function.NAME, function.routed),)
        return "function", Site(home, table, function.routed_table), others
    looked_up = interface.seam_of(home, forward)
    if looked_up is not None:
        return ("interface", *looked_up)
    by_itself = formula.is_formula(forward) and not formula.convolves(module)
    if by_itself and (flash is None or method.missing(flash, module)):
        return "formula", Site(owner, "forward", formula.by_formula), ()
    if flash is None:
        return None
    scope = sys.modules[inspecting.defining(flash, "forward").__module__]
    site = Site(owner, "forward", method.OnFlashClass(owner))
    if method.is_method_seam(flash):
        return "method", site, (Site(scope, method.WINDOW_FLAG, method.window_flag),)
    return "function", site, (Site(scope, function.NAME, function.routed),)


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
