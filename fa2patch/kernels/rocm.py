"""AMD's own attention for ROCm, ``aiter.flash_attn_varlen_func``. Nobody has run fa2patch on ROCm: the trial decides.

There, torch's operators (kernels of CK or AOTriton) and builds of flash-attn for ROCm come under the names
``torch_varlen``, ``efficient`` and ``flash_attn``.
"""

from __future__ import annotations

import torch

from .varlen import VarlenFunc


class Aiter(VarlenFunc):
    # The signature is that of FlashAttention 2, but for ``logits_soft_cap`` (aiter/ops/mha.py, August 2026). Attention
    # sinks are left out: there they are a pointer, and a third number of the window.

    name = "aiter"
    what = "AMD's aiter"
    needs = "torch for ROCm, and aiter"
    source = "aiter"
    FEATURES = frozenset({"window", "softcap", "alibi", "dropout", "deterministic", "trees", "spans"})

    def available(self) -> tuple[bool, str]:
        if torch.version.hip is None:
            return False, "this torch is not built for ROCm"
        return super().available()
