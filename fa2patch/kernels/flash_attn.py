"""FlashAttention 2, 3 and 4.

FlashAttention 2 is the ``flash_attn`` package, versions 2.1 to 2.8. FlashAttention 3 is the ``flash_attn_interface``
module, built from flash-attention's ``hopper`` folder. FlashAttention 4 is ``flash_attn.cute`` (the package
flash-attn-4), written in CuTe's Python and compiled at first use.
"""

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
