"""FlashAttention 4 (``flash_attn.cute``, the package flash-attn-4), written in CuTe's Python, compiled at first use."""

from __future__ import annotations

from .varlen_func import VarlenFunc


class FlashAttn4(VarlenFunc):
    """FlashAttention 4, for Hopper and Blackwell. It has attention sinks, but no dropout or alibi. Pre-release only."""

    name = "flash_attn_4"
    what = "FlashAttention 4"
    needs = "pip install --pre flash-attn-4"
    module = "flash_attn.cute"
    FEATURES = frozenset({"window", "softcap", "sinks", "deterministic", "trees", "spans"})
