"""Models that cannot be trained packed. Each function looks at one thing that speaks against it, and raises for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .._types import Model
from ..errors import LayerNotPatchable, UnsupportedModel
from . import inspecting
from .architectures import row_of
from .facts import Facts, Site
from .find_layers import Layer, ModelLayers, blocks_without, claims_flash_attention
from .find_models import (
    embedding_of,
    is_transformers_model,
    named_modules,
    stacks_of,
    takes_no_token_ids,
    token_embeddings,
)
from .seams.bias import computes_bias
from .step import Step, Trait
from .transformers_names import ATTENTION_FUNCTIONS


def kind(model: ModelLayers, facts: Facts) -> None:
    if takes_no_token_ids(model.model):
        token_embeddings(model.model)  # raises the error that verify raises, too


def pairs_within(model: ModelLayers, facts: Facts) -> None:
    # An encoder-decoder inside a model that puts pictures in front of its sources (InstructBLIP, BLIP-2).
    outer, inner = model.entered[0], model.entered[-1]
    if type(outer.config) is not type(inner.config):
        raise UnsupportedModel(
            f"{model} holds {type(inner).__name__}, an encoder-decoder, and makes its sources itself, of pictures or "
            "sound and text: where each of them starts is not known. Nothing was patched. Train this model padded."
        )


def stacks(model: ModelLayers, facts: Facts) -> None:
    # FSMT's stacks and a transducer's decoder are plain modules. MusicGen's and Dia's decoders read codebooks.
    encoder, decoder = stacks_of(model.model) or (model.decoder, model.decoder)
    for stack in (encoder, decoder):
        if not is_transformers_model(stack):
            raise UnsupportedModel(
                f"{model} holds {type(stack).__name__}, which is no Transformers model by itself: nothing could hand "
                "it boundaries. Nothing was patched. Train this model padded."
            )
    if not isinstance(getattr(embedding_of(decoder), "weight", None), torch.Tensor):
        raise UnsupportedModel(
            f"{model} has a decoder, {type(decoder).__name__}, that reads several tokens at a time, as codebooks of "
            "sound are: targets are packed only with one token at each place. Nothing was patched. Train this model "
            "padded."
        )


def unreadable_code(model: ModelLayers, facts: Facts) -> None:
    # A partialmethod or a callable object cannot be read.
    for cls in dict.fromkeys(map(type, model.modules.values())):
        forward = inspecting.forward_of(cls)
        if not inspecting.is_of_torch(cls) and inspecting.code_of(forward) is None:
            raise LayerNotPatchable(
                "looked at every module's forward for what it takes and does: expected functions, found that "
                f"{cls.__module__}.{cls.__qualname__}.forward is a {type(forward).__name__}. Nothing was patched. "
                "Write it as a method (def forward(self, ...): ...), or train this model padded."
            )


def config_of_its_row(model: ModelLayers, facts: Facts) -> None:
    config = model.model.config
    for row, of in ((facts.architecture, model.decoder.config), (row_of(config), config)):
        reason = row.refuse(of) if row.refuse is not None else None
        if reason:
            raise UnsupportedModel(f"{model} cannot be trained packed: {reason}.")


def mixers_without_boundaries(model: ModelLayers, facts: Facts) -> list[Site]:
    carrying = {} if model.by_document else model.carrying
    facts.has_mixers = bool(carrying)
    covered = tuple(f"{layer.name}." for layer in model.mixers)
    left = {name: what for name, what in carrying.items() if not f"{name}.".startswith(covered)}
    if left:
        (name, what), *others = left.items()
        raise UnsupportedModel(
            f"{type(model.decoder).__name__} carries state along the row outside attention, in {what} at {name}"
            f"{f' and {len(others)} more places' if others else ''}. Nothing that it is handed could tell it where "
            "documents start, so they would leak there. Nothing was patched. Train this model padded."
        )
    return [layer.site for layer in model.mixers] if carrying else []


def attention(model: ModelLayers, facts: Facts) -> list[Site]:
    _require_layers(model)
    return [site for layer in model.attention for site in (layer.site, *layer.others) if layer.seam != "document"]


def _require_layers(model: ModelLayers) -> None:
    # A block without such a layer counts only if its siblings have one and it may look at other tokens itself.
    without = blocks_without(model)
    if model.layers and not without:
        return
    blocks = ", ".join(f"{name} ({cls})" for name, cls in list(without.items())[:4]) or "no layer at all"
    do = "Train this model padded, and please report it with the Transformers version."
    for cls in dict.fromkeys(map(type, named_modules(model.decoder).values())):
        home = str(getattr(inspecting.forward_of(cls), "__module__", ""))
        if cls.__module__.startswith("transformers.") and home.split(".")[0] not in ("transformers", "torch", ""):
            do = (
                f"The forward of {cls.__name__} is not Transformers' own but that of {home}: train with what that "
                "package offers, or load the model without it."
            )
            break
    raise LayerNotPatchable(
        f"{type(model.decoder).__name__}: looked in every layer for attention with a seam (a module-level "
        f"{ATTENTION_FUNCTIONS[0]}, or attention written out) and found {len(model.layers)} such layers; "
        f"without one: {blocks}. Nothing was patched. {do}"
    )


def unclaimed_flash(model: ModelLayers, facts: Facts) -> None:
    # A model without `_supports_flash_attn` passes if a layer has another seam than the interface, if its layers add a
    # bias that is known, or if its architecture is registered or was named in `apply`.
    classes = {type(layer.module) for layer in model.attention}
    biases = {cls for cls in classes if computes_bias(inspecting.forward_of(cls))}
    biased = [layer for layer in model.attention if type(layer.module) in biases]
    if biased:
        _refuse_bias_from_elsewhere(model, biased)
    if len(biased) == len(model.attention) or model.vouched:
        return
    if claims_flash_attention(model.entered, model.attention):
        return
    raise UnsupportedModel(
        f"{model} does not claim flash attention (_supports_flash_attn): its attention may look at more than "
        "boundaries can say. Nothing was patched. If it is ordinary attention, say so: "
        f"fa2patch.register(fa2patch.Architecture({model.decoder.config.model_type!r}))."
    )


def _refuse_bias_from_elsewhere(model: ModelLayers, biased: Iterable[Layer]) -> None:
    # Udop's stack adds up biases of distances and of places on a page, which no two tokens of two rows share.
    within = tuple(f"{layer.name}." for layer in biased)
    tables = {name[len(prefix) :] for prefix in within for name in model.text_modules if name.startswith(prefix)}
    tables = {name for name in tables if "." not in name}
    for name, module in model.text_modules.items():
        outside = not f"{name}.".startswith(within) and type(module) is torch.nn.Embedding
        if outside and name.rpartition(".")[2] in tables:
            raise UnsupportedModel(
                f"{model} adds to its attention scores what {name} holds, which is no bias of distances alone and "
                "which packed attention has no way to say. Nothing was patched. Train this model padded."
            )


class FusedFlash(Trait):
    # ModernBERT's flash function unpads by itself and takes no boundaries (4.48 to 5.0). The implementation may be
    # another one after `apply`, so a packed batch is refused, too.

    name = "fused flash"

    def finds(self, model: ModelLayers) -> bool | None:
        return True if any(layer.fused for layer in model.attention) else None

    def refuses(self, model: ModelLayers, found: Any) -> None:
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
