"""FlashAttention 2 (the ``flash_attn`` package), versions 2.1 to 2.8."""

from __future__ import annotations

from functools import lru_cache

from .varlen_func import Found, VarlenFunc, in_package


class FlashAttn(VarlenFunc):
    """FlashAttention 2. Its signature shows what older versions lack: windows before 2.3, softcap before 2.6."""

    name = "flash_attn"
    what = "FlashAttention 2"
    needs = "pip install flash-attn (2.1 to 2.8)"
    FEATURES = frozenset({"window", "softcap", "alibi", "dropout", "deterministic"})

    def found(self) -> Found:
        """The entry point of ``flash_attn``, looked for once."""
        return _found()


@lru_cache(maxsize=1)
def _found() -> Found:
    return in_package("flash_attn", "flash_attn")
