"""Attention layers: the seam of each layer is replaced, or the model is refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..._types import Model
from ...errors import LayerNotPatchable, UnsupportedModel
from ..find_layers import blocks_without, claims_flash_attention
from ..looked import Looked
from ..seams import interface, method
from ..site import Site
from ..step import Step
from .trait import Trait


class AttentionLayers(Trait):
    """Refuse a decoder without layers that can be given the boundaries, or with a block that lacks one.

    A block counts only if its siblings have such a layer and it may look at other tokens itself.
    """

    name = "attention"

    def refuses(self, model: Looked, found: Any) -> None:
        layers = list(model.layers)
        without = blocks_without(model.decoder, layers)
        if layers and not without:
            return
        blocks = ", ".join(f"{name} ({cls})" for name, cls in list(without.items())[:4]) or "no layer at all"
        foreign = _foreign_forward(model.decoder)
        do = "Train this model padded, and please report it with the Transformers version."
        if foreign:
            do = f"{foreign}: train with what that package offers, or load the model without it."
        raise LayerNotPatchable(
            f"{type(model.decoder).__name__}: looked in every layer for attention with a seam (a module-level "
            f"{interface.REGISTRIES[0]}, or a ...FlashAttention2 class) and found {len(layers)} such layers; without "
            f"one: {blocks}. Nothing was patched. {do}"
        )

    def replaces(self, model: Looked, found: Any) -> Iterable[Site]:
        return [site for layer in model.attention for site in (layer.site, *layer.others) if layer.seam != "document"]


def _foreign_forward(decoder: Model) -> str:
    """Name the first class of Transformers whose forward another package has replaced; empty if there is none."""
    for cls in dict.fromkeys(type(module) for module in decoder.modules()):
        home = str(getattr(cls.forward, "__module__", ""))
        if cls.__module__.startswith("transformers.") and home.split(".")[0] not in ("transformers", "torch", ""):
            return f"The forward of {cls.__name__} is not Transformers' own but that of {home}"
    return ""


class BrokenFlashClass(Trait):
    """Refuse a layer whose flash class calls a method that the layer does not have (ESM in 4.54 and 4.55)."""

    name = "broken flash class"

    def finds(self, model: Looked) -> str | None:
        for layer in model.attention:
            make = layer.site.make
            if isinstance(make, method.OnFlashClass):
                name = method.missing(make.flash, layer.module)
                if name:
                    return (
                        f"{layer.name} ({type(layer.module).__name__}), whose {make.flash.__name__} calls self.{name}"
                    )
        return None

    def refuses(self, model: Looked, found: str) -> None:
        raise LayerNotPatchable(
            f"{type(model.decoder).__name__}: packed rows would be computed by the class for flash attention of "
            f"{found}, and this version of Transformers has no such method. Nothing was patched. Upgrade Transformers, "
            "or train this model padded."
        )


class FusedFlash(Trait):
    """Refuse flash attention where its function unpads by itself and takes no boundaries (ModernBERT, 4.48 to 5.0).

    The implementation may be another one after ``apply``, so a packed batch is refused, too.
    """

    name = "fused flash"

    def finds(self, model: Looked) -> bool | None:
        return True if any(layer.fused for layer in model.attention) else None

    def refuses(self, model: Looked, found: Any) -> None:
        _refuse_unpadding(model.decoder)

    def before(self, step: Step, found: Any) -> None:
        if step.mask is not None:
            _refuse_unpadding(step.module)


def _refuse_unpadding(model: Model) -> None:
    if model.config._attn_implementation == "flash_attention_2":
        raise UnsupportedModel(
            f"{type(model).__name__} with flash_attention_2 takes padding out on its own in this version of "
            "Transformers, and nothing that it is handed says where documents start. Load it with "
            'attn_implementation="sdpa": fa2patch has its packed rows computed by flash attention all the same.'
        )


class UnclaimedFlash(Trait):
    """Refuse a model that does not claim to support flash attention.

    A model without ``_supports_flash_attn`` passes if a layer has another seam than the interface, or if its
    architecture is registered or was named in ``apply``.
    """

    name = "unclaimed flash"

    def finds(self, model: Looked) -> bool | None:
        said = model.vouched or claims_flash_attention(model.model, model.attention)
        return None if said or not model.attention else True

    def refuses(self, model: Looked, found: Any) -> None:
        raise UnsupportedModel(
            f"{model} does not claim flash attention (_supports_flash_attn): its attention may look at more than "
            "boundaries can say. Nothing was patched. If it is ordinary attention, say so: "
            f"fa2patch.register(fa2patch.Architecture({model.decoder.config.model_type!r}))."
        )
