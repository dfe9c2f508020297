"""Lets a packed mask through the functions that make 4-D masks, so that none is ever made for a packed batch.

4.34: ``Model._prepare_decoder_attention_mask`` (Falcon: ``_prepare_attn_mask``); 4.35 on: ``_prepare_4d_*`` in the
modeling module; 4.38 to 4.52: ``Model._update_causal_mask``, on a GPU ``AttentionMaskConverter`` too; 4.53 on:
``create_*_mask`` in the modeling module.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from dataclasses import replace
from itertools import chain
from typing import Any, Callable

import torch

from ...documents.boundaries import largest
from ...errors import PackingNotIsolated
from ..packed_mask import PackedMask, find
from . import directions

TWO_MASKS = "_update_attention_mask"
"""4.48's to 5.0's ModernBERT makes one mask for global and one for local layers, which hand on their window too."""

METHODS = (
    "_update_causal_mask",
    "_prepare_decoder_attention_mask",
    "_prepare_attn_mask",
    "_update_linear_attn_mask",
    "_update_mamba_mask",
    TWO_MASKS,
)
FUNCTIONS = re.compile(r"create_\w*masks?(_mapping|_for_generate|_for_vision_model)?|_prepare_4d_\w+")
MASK = "attention_mask"
UNMASK = "_unmask_unattended"

BOTH_WAYS = {"or_mask_function": None, "block_sequence_ids": 0, "token_type_ids": 1}
"""Arguments with which tokens of an image see each other in both directions (Gemma 3), and from which number on."""


def sites(base_model: type) -> list[tuple[Any, str]]:
    """``(owner, attribute)`` of every function that makes a mask for this model, or for what it inherits from."""
    owners: list[tuple[Any, str]] = [
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
    return owners


def _makes_one(method: Any) -> bool:
    """4.46's and 4.47's OPT returns two masks from ``_update_causal_mask``, made by functions that are let through."""
    return "input_shape" not in inspect.signature(method).parameters or method.__name__ != METHODS[0]


def position_embeddings(decoder: Any) -> list[Any]:
    """Embeddings of positions that are handed the mask, to count its ones (OPT, BioGPT)."""
    return [module for module in decoder.modules() if isinstance(module, torch.nn.Embedding) and _counts_mask(module)]


def _counts_mask(embedding: Any) -> bool:
    first = next(iter(inspect.signature(embedding.forward).parameters.values()))
    behind_args = first.kind is first.VAR_POSITIONAL and hasattr(embedding, "offset")  # somebody's wrapper is on it
    return first.name == MASK or behind_args


def counted_by_position_ids(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replacement for such an embedding's ``forward``: a packed batch's positions are its ``position_ids``."""

    @functools.wraps(original)
    def forward(self: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(attention_mask, PackedMask):
            return original(self, attention_mask, *args, **kwargs)
        return torch.nn.Embedding.forward(self, attention_mask.position_ids + self.offset)

    return forward


def let_through(original: Callable[..., Any]) -> Callable[..., Any]:
    """``original``, but a packed mask among the arguments is the result; with the window where one was asked for.

    (5.x's Qwen2MoE has its window in the mask only: its attention layers don't pass it on to flash attention.)
    """

    names = inspect.signature(original).parameters

    @functools.wraps(original)
    def make_mask(*args: Any, **kwargs: Any) -> Any:
        mask = find(chain(args, kwargs.values()))
        if mask is None:
            return original(*args, **kwargs)
        given = {**dict(zip(names, args)), **kwargs}
        both_ways = directions.adds_the_later_ones(given.get("config"))  # and so do the layers: checked by apply
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
        if "chunked_attention_mask" in names:  # 4.51's and 4.52's Llama 4 makes two
            return mask, _chunked(mask, given["self"].config)
        if "sliding_window" in original.__name__:
            window = getattr(given.get("config"), "sliding_window", None) or None
            if window and directions.is_two_sided(original, given["config"]):
                window = directions.reach(window)
            return replace(mask, window=window)
        return mask

    return make_mask


def _chunked(mask: PackedMask, config: Any) -> PackedMask:
    return replace(mask, boundaries=mask.boundaries.chunked(config.attention_chunk_size))
