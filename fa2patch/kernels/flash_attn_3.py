"""FlashAttention 3 (the ``flash_attn_interface`` module, built from flash-attention's ``hopper`` folder)."""

from __future__ import annotations

from .varlen_func import VarlenFunc


class FlashAttn3(VarlenFunc):
    """FlashAttention 3, for Hopper. It has no dropout and no alibi."""

    name = "flash_attn_3"
    what = "FlashAttention 3"
    needs = "flash_attn_interface, built from source"
    module = "flash_attn_interface"
    FEATURES = frozenset({"window", "softcap", "deterministic", "trees", "spans"})
