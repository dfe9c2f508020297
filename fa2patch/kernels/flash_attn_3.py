"""FlashAttention 3 (the ``flash_attn_interface`` module, built from flash-attention's ``hopper`` folder)."""

from __future__ import annotations

from functools import lru_cache

from .varlen_func import Found, VarlenFunc, in_package


class FlashAttn3(VarlenFunc):
    """FlashAttention 3, for Hopper. It has no dropout and no alibi."""

    name = "flash_attn_3"
    what = "FlashAttention 3"
    needs = "flash_attn_interface, built from source"
    FEATURES = frozenset({"window", "softcap", "deterministic"})

    def found(self) -> Found:
        """The entry point of ``flash_attn_interface``, looked for once."""
        return _found()


@lru_cache(maxsize=1)
def _found() -> Found:
    return in_package("flash_attn_interface", "flash_attn_interface")
