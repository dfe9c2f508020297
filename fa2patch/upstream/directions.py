"""Whether tokens see later tokens, according to a model's masks and according to its attention layers.

Eager attention follows the mask. All other implementations and packed attention follow the layer's ``is_causal``. A
model whose mask and layers differ is refused, because it is not known which of them is right.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from .._types import Config, Function, Model
from ..errors import LayerNotPatchable, UnsupportedModel
from . import inspecting
from .facts import Facts
from .find_layers import Layer, ModelLayers
from .find_models import named_modules
from .other_code import is_known
from .seams.formula import is_causal
from .transformers_names import ENCODED, MASKING, imported

_MAKES = re.compile(r"create_\w*mask\w*")
_LATER = re.compile(r"causal|tril|triu|future|decoder_attention_mask|_prepare_attn_mask")
_EXTENDS = "get_extended_attention_mask"  # hides later tokens in a decoder
_DIGIT = re.compile(r"(^|\.)\d")  # a member of a list of blocks
# the argument of functions that make masks (4.53 on) for a function that lets more tokens be seen
ADDED = "or_mask_function"

_FLAG = "use_bidirectional_attention"


def look(model: ModelLayers, facts: Facts) -> None:
    if model.unknown:  # it makes masks for each document itself
        return
    _require_said(model)
    own = _without_cross(model)
    facts.both_ways = any(layer.fused or not is_causal(layer.module, otherwise=not layer.by_itself) for layer in own)
    facts.contradiction = _contradiction(model.entered, [layer.module for layer in own])
    forwards = [inspecting.forward_of(type(one)) for one in model.entered]
    facts.told_of_types = any(_makers_called(each) and inspecting.takes(each, "token_type_ids") for each in forwards)
    if facts.contradiction and not facts.told_of_types:
        raise UnsupportedModel(
            f"{facts.contradiction}: eager attention would go by the one, every other by the other, and what is right "
            "is not known. Nothing was patched. Change the config so that they agree, or train this model padded."
        )


def _without_cross(model: ModelLayers) -> list[Layer]:
    # Cross attention sees all of its source, and says nothing of the direction. It is in a block that takes an
    # encoder's states, beside the layer that says it.
    classes = {type(block) for block in model.text_modules.values()}
    takes = {cls for cls in classes if inspecting.takes(inspecting.forward_of(cls), ENCODED)}
    taking = [name for name, block in model.text_modules.items() if type(block) in takes and _DIGIT.search(name)]
    if not taking:
        return list(model.attention)
    causal = {layer: is_causal(layer.module, otherwise=not layer.by_itself) for layer in model.attention}

    def block_of(layer: Layer) -> list[str]:
        return [name for name in taking if layer.name.startswith(f"{name}.")]

    deciding = {name for layer in model.attention if causal[layer] for name in block_of(layer)}
    return [layer for layer in model.attention if causal[layer] or deciding.isdisjoint(block_of(layer))]


def _contradiction(entered: Sequence[Any], layers: Sequence[Any]) -> str:
    """How a model's masks and the modules of its attention layers differ; empty if they agree or it cannot be read."""
    turned = next(filter(_is_turned, layers), None)
    if turned is not None and _masks_come_from_upstream(entered[-1]):
        return (
            f"{type(turned).__name__} makes layers with is_causal=True, and this one has is_causal=False, while the "
            f"masks that {type(entered[-1]).__name__} makes still hide later tokens"
        )
    asked = {bool(getattr(layer, "is_causal", True)): layer for layer in layers}
    for model in entered:
        said = _causal_masks(model)
        layer = None if said is None else asked.get(not said)
        if layer is not None:
            return (
                f"{type(model).__name__}.forward makes masks in which tokens see {'no' if said else 'all'} later ones, "
                f"and its {type(layer).__name__} has is_causal={not said}"
            )
    return ""


def _is_turned(layer: Any) -> bool:
    # LLM2Vec sets the `is_causal` of causal layers to False after they were made.
    made = inspecting.defining(type(layer), "__init__").__init__  # type: ignore[misc]
    return getattr(layer, "is_causal", True) is False and inspecting.stored(made, "is_causal") == {True}


def _masks_come_from_upstream(decoder: Any) -> bool:
    # If known code makes the masks for causal attention, tokens see no later ones.
    forward = type(decoder).forward
    methods = (getattr(type(decoder), name, None) for name in inspecting.names_read(forward) if _LATER.search(name))
    makes = [method for method in methods if method is not None]
    return _causal_masks(decoder) is not False and all(map(is_known, [forward, *makes]))


def _require_said(model: ModelLayers) -> None:
    # It must be known whether a model is causal. Layers that compute attention by themselves follow the mask, and most
    # of them are encoders'.
    alone = [layer.module for layer in model.attention if layer.by_itself]
    silent = next((one for one in alone if not (hasattr(one, "is_causal") or hasattr(one, "is_decoder"))), None)
    names = [] if silent is None else list(_names_in(model.decoder))
    decoder, layer = type(model.decoder).__name__, type(silent).__name__
    alibi, later = next((name for name in names if "alibi" in name), ""), next(filter(_LATER.search, names), "")
    if getattr(model.decoder.config, "is_decoder", False) and _EXTENDS in names:  # Pix2Struct up to 4.45
        later = later or _EXTENDS
    if alibi:  # BLOOM, MPT
        what = f"adds alibi ({alibi}) to its attention scores, a bias for the distance of two tokens, and"
        unsaid = f"{what} {layer} hands it to no kernel"
    elif later:
        unsaid = f"uses {later}, which may hide later tokens, and its {layer} does not say whether they are seen"
    else:
        return
    raise LayerNotPatchable(
        f"{decoder} {unsaid}. Nothing was patched. Train this model padded, and please report it with the Transformers "
        "version."
    )


def _names_in(decoder: Model) -> Iterator[str]:
    # the names that the methods of a decoder and of its modules use
    for cls in dict.fromkeys(map(type, named_modules(decoder).values())):
        for base in cls.__mro__:
            if base.__module__ == cls.__module__ and not inspecting.is_of_torch(base):
                for function in vars(base).values():
                    yield from inspecting.names_read(getattr(function, "__func__", function))


def _causal_masks(model: Model) -> bool | None:
    """Whether the masks that a model's ``forward`` makes hide later tokens; None if its code does not show it."""
    forward = inspecting.forward_of(type(model))
    made = _makers_called(forward)
    names = [name for name in inspecting.names_read(forward) if name != _FLAG]
    if not made or any("bidirectional" in name for name in names):  # T5Gemma up to 4.57 adds such a function
        return None
    config = inspecting.text_config(model.config)
    scope = vars(sys.modules[forward.__module__])
    if made[0] in scope and is_two_sided(scope[made[0]], config):
        return False
    adds = inspecting.has_constant(forward, ADDED) and inspecting.reads_name(forward, _FLAG)
    return not (adds_the_later_ones(config) and adds)


def _makers_called(forward: Function) -> list[str]:
    return [name for name in inspecting.names_read(forward) if _MAKES.fullmatch(name)]


def adds_the_later_ones(config: object) -> bool:
    # EmbeddingGemma is otherwise causal, and its config lets all tokens see each other.
    return getattr(config, _FLAG, None) in (True, "all")


def is_two_sided(function: object, config: Config) -> bool:
    # In 5.x a function for causal masks makes two-sided masks, too, if `config.is_causal` is False.
    turned = inspecting.has_constant(function, "is_causal") and not getattr(config, "is_causal", True)
    return turned or "bidirectional" in getattr(inspecting.code_of(function), "co_name", "")


def reach(window: int) -> int:
    """The smallest distance at which a two-sided sliding window of Transformers hides two tokens from each other."""
    # It is `config.sliding_window`, or one more in versions whose window includes that distance.
    masking = imported(MASKING)
    overlay = getattr(masking, "sliding_window_bidirectional_overlay", None)
    return window + 1 if overlay is not None and overlay(window)(0, 0, 0, window) else window
