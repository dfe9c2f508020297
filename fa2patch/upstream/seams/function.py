"""The function seam (4.43 on): flash classes call ``modeling_x._flash_attention_forward``.

A modeling module imports this name only where flash-attn is installed. Elsewhere fa2patch adds it. Gemma 2 in 4.47 and
GPT-NeoX in 4.47 and 4.48 have a dictionary of functions instead of classes. Its function for flash attention calls
``_flash_attention_forward``.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from itertools import chain
from types import ModuleType
from typing import Any, Callable

import torch

from ..._types import Call, Function
from ...binding import ABSENT
from ...errors import PackingNotIsolated
from ...kernels import Options
from .. import inspecting
from ..inspecting import require_of_model
from ..packed_mask import PackedMask, find
from . import fused

NAME = "_flash_attention_forward"
FLASH = "flash_attention_2"


def routed(original: Any) -> Callable[..., torch.Tensor]:
    """Return the replacement for ``_flash_attention_forward``.

    The replacement takes query, key and value as ``[batch, length, heads, dim]``. It raises
    :class:`PackingNotIsolated` for further positional arguments with a packed mask, and ImportError for a dense batch
    if flash-attn is missing.

    Args:
        original: the function, or :data:`ABSENT` where the module lacks it.
    """

    def _flash_attention_forward(
        query_states: torch.Tensor,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        attention_mask: Any,
        query_length: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if isinstance(attention_mask, PackedMask):
            if args:
                raise PackingNotIsolated(
                    f"{NAME} was called with positional arguments whose meaning differs between versions. "
                    "Please report the model; until then train it padded."
                )
            return attention_mask.attend(attention_mask.layer, query_states, key_states, value_states, options(kwargs))
        if original is ABSENT:
            raise ImportError(
                "FlashAttention2 was asked for a batch that is not packed, but the package flash-attn is missing. "
                'Load the model with attn_implementation="sdpa".'
            )
        return original(query_states, key_states, value_states, attention_mask, query_length, *args, **kwargs)

    return _flash_attention_forward if original is ABSENT else functools.wraps(original)(_flash_attention_forward)


def table_name(modeling: ModuleType, forward: Function) -> str | None:
    """Return the name of the dictionary in which a layer's ``forward`` looks up its attention function, or None."""
    names = (name for name in inspecting.names_read(forward) if re.fullmatch(r"\w+_ATTENTION_FUNCTION", name))
    return next((name for name in names if FLASH in vars(modeling).get(name, ())), None)


class _Gemma2Layer:
    """A layer with the attribute that 4.47's function for flash attention reads and no layer has."""

    _flash_attn_uses_top_left_mask = False

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def routed_table(original: dict[str, Function]) -> dict[str, Function]:
    """Return a copy of the dictionary, in which every function computes packed batches as flash attention does.

    A packed batch goes to the function for flash attention, or to :func:`fused.computed` if that function is fused.
    """
    flash = original[FLASH]
    casts, fuses = inspecting.takes(flash, "target_dtype"), fused.is_fused(flash)

    def route(function: Function) -> Function:
        @functools.wraps(function)
        def attention(*args: Any, **kwargs: Any) -> Any:
            mask = find(chain(args, kwargs.values()))
            if mask is None:
                return function(*args, **kwargs)
            module = args[0] if isinstance(args[0], torch.nn.Module) else None
            require_of_model(function, module)
            of_layer = replace(mask, layer=module)
            if fuses:
                return fused.computed(flash, module, of_layer, kwargs)
            known = {id(mask): of_layer, id(module): _Gemma2Layer(module)}
            args = tuple(known.get(id(value), value) for value in args)
            kwargs = {name: of_layer if value is mask else value for name, value in kwargs.items()}
            if casts:
                kwargs["target_dtype"] = args[1].dtype
            return flash(*args, **kwargs)

        return attention

    return {name: route(function) for name, function in original.items()}


def options(kwargs: Call) -> Options:
    """Return the options of a flash class's keywords. ``dropout`` is a ``Dropout`` module in 4.34's Falcon."""
    dropout = kwargs.get("dropout") or 0.0
    causal = kwargs.get("is_causal")
    return Options(
        scale=kwargs.get("softmax_scale"),
        causal=True if causal is None else causal,
        window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        dropout=getattr(dropout, "p", dropout),
    )
