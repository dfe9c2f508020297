"""FlashAttention 2 (the ``flash_attn`` package), versions 2.1 to 2.8."""

from __future__ import annotations

from .varlen_func import VarlenFunc


class FlashAttn(VarlenFunc):
    """FlashAttention 2. Its signature shows what older versions lack: windows before 2.3, softcap before 2.6."""

    name = "flash_attn"
    what = "FlashAttention 2"
    needs = "pip install flash-attn (2.1 to 2.8)"
    module = "flash_attn"
    CAPABILITY = (8, float("inf"))
    FEATURES = frozenset({"window", "softcap", "alibi", "dropout", "deterministic", "trees", "spans"})
