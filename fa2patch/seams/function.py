"""The function seam (4.43 on): flash classes call ``modeling_x._flash_attention_forward``.

The name is imported into a modeling module only where flash-attn is installed; where it is missing it is put there.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch

from ..attention import Options
from ..binding import ABSENT
from ..errors import PackingNotIsolated
from .packed_mask import PackedMask

NAME = "_flash_attention_forward"


def routed(original: Any) -> Callable[..., torch.Tensor]:
    """Replacement for ``_flash_attention_forward``; query, key and value ``[batch, length, heads, dim]``."""

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


def options(kwargs: dict[str, Any]) -> Options:
    """What the keywords of a flash class's call ask for; dropout is a Dropout module in 4.34's Falcon."""
    dropout = kwargs.get("dropout") or 0.0
    causal = kwargs.get("is_causal")
    return Options(
        scale=kwargs.get("softmax_scale"),
        causal=True if causal is None else causal,
        window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        dropout=getattr(dropout, "p", dropout),
    )
