"""Attention functions that take query, key and value in one tensor (ModernBERT, 4.48 to 5.0).

They are in a module's dictionary and apply the rotary embedding too. The function for flash attention unpads by itself
and takes no boundaries. A packed batch is therefore computed here, in the way of the dictionary's other functions.
"""

from __future__ import annotations

from typing import Any

import torch

from ..._types import Call, Function
from ...kernels import Options
from .. import inspecting
from ..packed_mask import PackedMask

FUSED = "qkv"


def is_fused(function: Function) -> bool:
    """Whether an attention function takes query, key and value in one tensor."""
    return inspecting.takes(function, FUSED)


def computed(function: Function, module: Any, mask: PackedMask, given: Call) -> tuple[torch.Tensor]:
    """Compute fused attention for a packed batch.

    Args:
        function: the function for flash attention. Its module has ``apply_rotary_pos_emb``.
        module: the attention layer.
        mask: the packed mask.
        given: the keywords of the call. ``qkv`` is ``[batch, length, 3, heads, dim]``; ``local_attention[0]`` is the
            number of tokens that a query sees on each side, -1 for all.

    Returns:
        A tuple of one tensor ``[batch, length, heads * dim]``.
    """
    qkv: torch.Tensor = given[FUSED]
    cos, sin = given.get("position_embeddings") or module.rotary_emb(qkv, position_ids=given["position_ids"])
    q, k, v = qkv.transpose(3, 1).unbind(dim=2)
    rotate = function.__globals__["apply_rotary_pos_emb"]
    q, k = rotate(q, k, cos, sin)
    reach = given["local_attention"][0]
    options = Options(
        scale=module.head_dim**-0.5,
        causal=False,
        window=None if reach < 0 else reach + 1,
        dropout=module.attention_dropout if module.training else 0.0,
    )
    return (mask.attend(module, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), options).flatten(2),)
