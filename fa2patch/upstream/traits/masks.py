"""Functions that make 4-D masks: they are replaced, so that a packed batch keeps its packed mask.

The functions are:

- 4.34: ``Model._prepare_decoder_attention_mask`` (Falcon: ``_prepare_attn_mask``)
- 4.35 on: ``_prepare_4d_*`` in the modeling module
- 4.38 to 4.52: ``Model._update_causal_mask``, and on a GPU ``AttentionMaskConverter`` as well
- ``Model.get_extended_attention_mask`` of encoders (up to 4.57), which makes a causal mask if they are decoders
- 4.53 on: ``create_*_mask`` in the modeling module
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from types import ModuleType
from typing import Any

import torch

from ..._types import Config, Function
from ...errors import UnsupportedModel
from .. import blocks, inspecting
from ..looked import Looked
from ..packed_mask import PackedMask, find
from ..site import Site
from . import directions, spans
from .trait import Trait

TWO_MASKS = "_update_attention_mask"
"""ModernBERT's method (4.48 to 5.0), which returns a mask for global and one for local layers.

Its local layers pass their window on themselves, so the packed mask needs none.
"""

METHODS = (
    "_update_causal_mask",
    "_prepare_decoder_attention_mask",
    "_prepare_attn_mask",
    "_update_linear_attn_mask",
    "_update_mamba_mask",
    "get_extended_attention_mask",
    TWO_MASKS,
)
FUNCTIONS = re.compile(r"create_\w*masks?(_mapping|_for_generate|_for_vision_model)?|_prepare_4d_\w+")
UNMASK = "_unmask_unattended"

MERGE = "_merge_input_ids_with_image_features"
"""A method that puts pictures into the row. PaliGemma's (4.41 to 4.44) also makes the mask and the position ids."""


class Masks(Trait):
    """Replace the functions that make masks for the models that a call goes through."""

    name = "masks"

    def refuses(self, model: Looked, found: Any) -> None:
        for cls in map(type, model.entered):
            merge = getattr(cls, MERGE, None)
            if merge is not None and inspecting.takes(merge, blocks.TYPES):
                raise UnsupportedModel(
                    f"{cls.__name__} makes the mask of its prefix while it merges pictures into the row, and makes "
                    "position ids of its own there. Nothing was patched. Upgrade Transformers (PaliGemma is packed "
                    "from 4.45 on), or train this model padded."
                )

    def replaces(self, model: Looked, found: Any) -> Iterable[Site]:
        return [site for inner in model.entered for site in sites(type(inner))]


def sites(base_model: type) -> list[Site]:
    """The sites of all functions that make masks for this class of models, or for a class that it inherits from."""
    own = [cls for cls in base_model.__mro__ if issubclass(cls, torch.nn.Module)]  # not a mix-in of all models
    owners: list[tuple[type | ModuleType, str]] = [
        (cls, name)
        for name in METHODS
        for cls in base_model.__mro__
        if name in vars(cls) and _makes_one(vars(cls)[name]) and (cls in own or calls(base_model, name))
    ]
    modules = dict.fromkeys(sys.modules[cls.__module__] for cls in base_model.__mro__ if "forward" in vars(cls))
    for module in modules:
        owners += [
            (module, name) for name, value in vars(module).items() if FUNCTIONS.fullmatch(name) and callable(value)
        ]
        converter = vars(module).get("AttentionMaskConverter")
        if converter is not None and UNMASK in vars(converter):
            owners.append((converter, UNMASK))
    return [Site(owner, name, let_through) for owner, name in owners]


def calls(model: type, name: str) -> bool:
    """Whether the ``forward`` of a class of models calls a method or a function of this name."""
    return any(inspecting.reads_name(forward, name) for forward in inspecting.forwards_that_run(model))


def _makes_one(method: Function) -> bool:
    """Whether a method returns one mask.

    OPT's in 4.46 and 4.47 returns two, and makes them with functions that are replaced.
    """
    return not inspecting.takes(method, "input_shape") or method.__name__ != METHODS[0]


def let_through(original: Function) -> Function:
    """Replacement for a function that makes masks: it returns the packed mask that is among its arguments.

    The packed mask gets the spans that the function is told of (:mod:`~fa2patch.upstream.blocks`), and the sliding
    window or the chunks that the function would have put into its mask. This is necessary for Qwen2MoE in 5.x, whose
    attention layers do not pass their window on to flash attention.

    Args:
        original: the function that is replaced. It is called if there is no packed mask.

    Returns:
        The replacement. It raises :class:`PackingNotIsolated` if tokens would see later ones in a way that is not known
        or cannot be computed.
    """
    names = inspecting.parameter_names(original)
    passes_on = _hands_blocks_on(original)

    @functools.wraps(original)
    def make_mask(*args: Any, **kwargs: Any) -> Any:
        mask = find(chain(args, kwargs.values()))
        if mask is None or passes_on:
            return original(*args, **kwargs)
        given = {**dict(zip(names, args)), **kwargs}
        told = blocks.blocks_of(original, given)
        mask = spans.seen(mask, told)
        if told is not None and original.__name__ in METHODS:
            return replace(mask, outright=True)
        if told is not None and blocks.window_of(given) is not None:
            return replace(mask, window=blocks.window_of(given))
        if original.__name__ == TWO_MASKS:
            return mask, mask
        if "chunked" in original.__name__:
            return _chunked(mask, given["config"])
        if "chunked_attention_mask" in names:  # Llama 4 in 4.51 and 4.52 makes two masks
            return mask, _chunked(mask, given["self"].config)
        if "sliding_window" in original.__name__ and mask.outright:
            return replace(mask, window=0)
        if "sliding_window" in original.__name__:
            window = getattr(given.get("config"), "sliding_window", None) or None
            if window and directions.is_two_sided(original, given["config"]):
                window = directions.reach(window)
            return replace(mask, window=window)
        return mask

    return make_mask


def _hands_blocks_on(function: Function) -> bool:
    """Whether a function of a modeling module has its masks made by others there, which are told of blocks.

    In 5.0 it is given ``token_type_ids`` (Gemma 4: ``mm_token_type_ids``). In 5.23 it is given the numbers of blocks,
    and in Gemma 4 only the mask of sliding layers has them.
    """
    told = (blocks.TYPES, blocks.MEDIA_TYPES, blocks.NUMBERS)
    given = any(inspecting.has_variable(function, name) for name in told) or inspecting.has_constant(
        function, blocks.ADDED
    )
    own = "masking_utils" not in function.__module__  # its functions are replaced in modeling modules only
    return given and own and any(FUNCTIONS.fullmatch(name) for name in inspecting.names_read(function))


def _chunked(mask: PackedMask, config: Config) -> PackedMask:
    if mask.rows[1] <= config.attention_chunk_size:
        return mask  # no document is longer than its row
    spans.refuse(mask, "chunks (attention_chunk_size)")
    rows = mask.rows
    return replace(mask, boundaries=mask.boundaries.chunked(config.attention_chunk_size, rows[0] * rows[1]))
