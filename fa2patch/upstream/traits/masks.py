"""Functions that make 4-D masks: they are replaced, so that a packed batch keeps its packed mask.

The functions are:

- 4.34: ``Model._prepare_decoder_attention_mask`` (Falcon: ``_prepare_attn_mask``)
- 4.35 on: ``_prepare_4d_*`` in the modeling module
- 4.38 to 4.52: ``Model._update_causal_mask``, and on a GPU ``AttentionMaskConverter`` as well
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

from ..._types import Config, Function
from ...documents.boundaries import largest
from ...errors import PackingNotIsolated
from .. import inspecting
from ..looked import Looked
from ..packed_mask import PackedMask, find
from ..site import Site
from . import directions
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
    TWO_MASKS,
)
FUNCTIONS = re.compile(r"create_\w*masks?(_mapping|_for_generate|_for_vision_model)?|_prepare_4d_\w+")
UNMASK = "_unmask_unattended"

BOTH_WAYS = {"or_mask_function": None, "block_sequence_ids": 0, "token_type_ids": 1}
"""Arguments that let the tokens of an image see each other in both directions (Gemma 3).

The value is the smallest number in the argument that marks an image; None if the argument alone is enough.
"""


class Masks(Trait):
    """Replace the functions that make masks for the models that a call goes through."""

    name = "masks"

    def replaces(self, model: Looked, found: Any) -> Iterable[Site]:
        return [site for inner in model.entered for site in sites(type(inner))]


def sites(base_model: type) -> list[Site]:
    """The sites of all functions that make masks for this class of models, or for a class that it inherits from."""
    owners: list[tuple[type | ModuleType, str]] = [
        (cls, name)
        for name in METHODS
        for cls in base_model.__mro__
        if name in vars(cls) and _makes_one(vars(cls)[name])
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


def _makes_one(method: Function) -> bool:
    """Whether a method returns one mask.

    OPT's in 4.46 and 4.47 returns two, and makes them with functions that are replaced.
    """
    return not inspecting.takes(method, "input_shape") or method.__name__ != METHODS[0]


def let_through(original: Function) -> Function:
    """Replacement for a function that makes masks: it returns the packed mask that is among its arguments.

    The packed mask gets the sliding window or the chunks that the function would have put into its mask. This is
    necessary for Qwen2MoE in 5.x, whose attention layers do not pass their window on to flash attention.

    Args:
        original: the function that is replaced. It is called if there is no packed mask.

    Returns:
        The replacement. It raises :class:`PackingNotIsolated` if tokens of an image would see each other in both
        directions.
    """
    names = inspecting.parameter_names(original)

    @functools.wraps(original)
    def make_mask(*args: Any, **kwargs: Any) -> Any:
        mask = find(chain(args, kwargs.values()))
        if mask is None:
            return original(*args, **kwargs)
        given = {**dict(zip(names, args)), **kwargs}
        both_ways = directions.adds_the_later_ones(given.get("config"))  # the layers do so too: apply has checked it
        for name, images_from in BOTH_WAYS.items():
            if both_ways and name == "or_mask_function":
                continue
            if given.get(name) is not None and (images_from is None or largest(given[name]) >= images_from):
                raise PackingNotIsolated(
                    f"{original.__name__} was called with {name}: in this model the tokens of an image see each other "
                    "in both directions, which packed attention has no way to say. Pack text only, or train padded."
                )
        if original.__name__ == TWO_MASKS:
            return mask, mask
        if "chunked" in original.__name__:
            return _chunked(mask, given["config"])
        if "chunked_attention_mask" in names:  # Llama 4 in 4.51 and 4.52 makes two masks
            return mask, _chunked(mask, given["self"].config)
        if "sliding_window" in original.__name__:
            window = getattr(given.get("config"), "sliding_window", None) or None
            if window and directions.is_two_sided(original, given["config"]):
                window = directions.reach(window)
            return replace(mask, window=window)
        return mask

    return make_mask


def _chunked(mask: PackedMask, config: Config) -> PackedMask:
    if mask.rows[1] <= config.attention_chunk_size:
        return mask  # no document is longer than its row
    return replace(mask, boundaries=mask.boundaries.chunked(config.attention_chunk_size))
