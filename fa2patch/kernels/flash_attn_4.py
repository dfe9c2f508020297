"""FlashAttention 4 (``flash_attn.cute``, the package flash-attn-4), written in CuTe's Python, compiled at first use."""

from __future__ import annotations

from functools import lru_cache

from .varlen_func import Found, VarlenFunc, in_package


class FlashAttn4(VarlenFunc):
    """FlashAttention 4, for Hopper and Blackwell. It has attention sinks, but no dropout or alibi. Pre-release only."""

    name = "flash_attn_4"
    what = "FlashAttention 4"
    needs = "pip install --pre flash-attn-4"
    FEATURES = frozenset({"window", "softcap", "sinks", "deterministic"})

    def found(self) -> Found:
        """The entry point of ``flash_attn.cute``, looked for once."""
        return _found()


@lru_cache(maxsize=1)
def _found() -> Found:
    return in_package("flash_attn.cute", "flash_attn.cute")
