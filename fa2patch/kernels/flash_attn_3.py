"""FlashAttention 3 (the ``flash_attn_interface`` module, built from flash-attention's ``hopper`` folder)."""

from __future__ import annotations

from .varlen_func import VarlenFunc


class FlashAttn3(VarlenFunc):
    """FlashAttention 3, for Hopper. It has no dropout and no alibi, and no code for devices after Hopper."""

    name = "flash_attn_3"
    what = "FlashAttention 3"
    needs = "flash_attn_interface, built from source"
    module = "flash_attn_interface"
    CAPABILITY = (8, 9)
    MADE_FOR = (9,)
    FEATURES = frozenset({"window", "softcap", "deterministic", "trees", "spans"})

    def takes(self, head_dim: int, value_dim: int) -> bool:
        """As in hopper/flash_api.cpp: MLA's dimensions, and small ones of q with v's up to those of the backward."""
        return (128 < head_dim <= 192 and 96 < value_dim <= 128) or (head_dim <= 64 and value_dim <= 256)
