"""Attention functions that are handed query, key and value in one tensor (ModernBERT, 4.48 to 5.0).

They stand in a module's dictionary, and do the rotary embedding too. The one for flash attention unpads on its own and
has no place for boundaries, so a packed batch is computed here, as the dictionary's others do it.
"""

from __future__ import annotations

import inspect
from typing import Any, Callable

import torch

from ...kernels.options import Options
from ..packed_mask import PackedMask

FUSED = "qkv"


def is_fused(function: Callable[..., Any]) -> bool:
    return FUSED in inspect.signature(function).parameters


def computed(function: Callable[..., Any], module: Any, mask: PackedMask, given: dict[str, Any]) -> tuple[torch.Tensor]:
    """``[batch, length, heads * dim]`` from ``given["qkv"]``, ``[batch, length, 3, heads, dim]``.

    ``given["local_attention"]`` is how many tokens a query sees on each side of it, -1 for all.
    """
    qkv: torch.Tensor = given[FUSED]
    cos, sin = given.get("position_embeddings") or module.rotary_emb(qkv, position_ids=given["position_ids"])
    q, k, v = qkv.transpose(3, 1).unbind(dim=2)
    q, k = function.__globals__["apply_rotary_pos_emb"](q, k, cos, sin)
    reach = given["local_attention"][0]
    options = Options(
        scale=module.head_dim**-0.5,
        causal=False,
        window=None if reach < 0 else reach + 1,
        dropout=module.attention_dropout if module.training else 0.0,
    )
    return (mask.attend(module, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), options).flatten(2),)
