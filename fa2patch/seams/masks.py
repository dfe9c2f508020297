"""Lets a packed mask through the functions that make 4-D masks, so that none is ever made for a packed batch.

4.34: ``Model._prepare_decoder_attention_mask`` (Falcon: ``_prepare_attn_mask``); 4.35 on: ``_prepare_4d_*`` in the
modeling module; 4.38 to 4.52: ``Model._update_causal_mask``; 4.53 on: ``create_*_mask`` in the modeling module.
"""

from __future__ import annotations

import functools
import re
import sys
from dataclasses import replace
from itertools import chain
from typing import Any, Callable

from ..errors import PackingNotIsolated
from .packed_mask import find

METHODS = ("_update_causal_mask", "_prepare_decoder_attention_mask", "_prepare_attn_mask")
FUNCTIONS = re.compile(r"create_\w*mask|_prepare_4d_\w+")


def sites(base_model: type) -> list[tuple[Any, str]]:
    """``(owner, attribute)`` of every function that makes a mask for this model, or for what it inherits from."""
    owners: list[tuple[Any, str]] = [(cls, name) for name in METHODS for cls in base_model.__mro__ if name in vars(cls)]
    modules = dict.fromkeys(sys.modules[cls.__module__] for cls in base_model.__mro__ if "forward" in vars(cls))
    return owners + [
        (module, name)
        for module in modules
        for name, value in vars(module).items()
        if FUNCTIONS.fullmatch(name) and callable(value)
    ]


def let_through(original: Callable[..., Any]) -> Callable[..., Any]:
    """``original``, but a packed mask among the arguments is the result; with the window where one was asked for.

    (5.x's Qwen2MoE has its window in the mask only: its attention layers don't pass it on to flash attention.)
    """

    @functools.wraps(original)
    def make_mask(*args: Any, **kwargs: Any) -> Any:
        mask = find(chain(args, kwargs.values()))
        if mask is None:
            return original(*args, **kwargs)
        if "chunked" in original.__name__:
            raise PackingNotIsolated("chunked attention inside documents is not supported: train this model padded.")
        if "sliding_window" in original.__name__:
            return replace(mask, window=getattr(kwargs.get("config"), "sliding_window", None) or None)
        return mask

    return make_mask
