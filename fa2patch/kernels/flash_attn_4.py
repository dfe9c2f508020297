"""FlashAttention 4 (``flash_attn.cute``, the package flash-attn-4), written in CuTe's Python, compiled at first use."""

from __future__ import annotations

from .varlen_func import VarlenFunc


class FlashAttn4(VarlenFunc):
    """FlashAttention 4, for Hopper and Blackwell. It has attention sinks, but no dropout or alibi. Pre-release only.

    On Hopper FlashAttention 3 and 2 come before it as long as it is a pre-release.
    """

    name = "flash_attn_4"
    what = "FlashAttention 4"
    needs = "pip install --pre flash-attn-4"
    module = "flash_attn.cute"
    CAPABILITY = (9, 12)
    MADE_FOR = (10, 11, 12)
    FEATURES = frozenset({"window", "softcap", "sinks", "deterministic", "trees", "spans"})

    def takes(self, head_dim: int, value_dim: int) -> bool:
        """What flash_attn/cute/interface.py takes on every device: MLA's dimensions, and any up to 128."""
        return (head_dim, value_dim) == (192, 128) or max(head_dim, value_dim) <= 128
