"""FlashAttention 4 (``flash_attn.cute``, the package flash-attn-4): written in CuTe's Python, compiled at first use."""

from __future__ import annotations

from functools import lru_cache

from .varlen_func import Found, VarlenFunc, in_package


class FlashAttn4(VarlenFunc):
    """For Hopper and Blackwell, with attention sinks; without dropout and alibi. Pre-releases only so far."""

    name = "flash_attn_4"
    what = "FlashAttention 4"
    needs = "pip install --pre flash-attn-4"
    FEATURES = frozenset({"window", "softcap", "sinks", "deterministic"})

    def found(self) -> Found:
        return _found()


@lru_cache(maxsize=1)
def _found() -> Found:
    return in_package("flash_attn.cute", "flash_attn.cute")
