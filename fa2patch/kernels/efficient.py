"""torch's memory-efficient attention (CUTLASS), called through its aten operator.

It supports float32 and any head dimension, which the flash kernels do not. It is not used with windows, because its
autograd ignores them (the derivative of ``_efficient_attention_forward`` does not pass them on).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from .._torch import uncompiled
from .protocol import HALF, Kernel

if TYPE_CHECKING:
    from ..documents.boundaries import Boundaries
    from .options import Options

_CAUSAL, _CAUSAL_FROM_THE_END, _EVERYTHING = 1, 2, 0
"""Values of ``custom_mask_type``: a query sees its document's keys up to its own position, counted from the first or
from the last key, or all of them."""


class Efficient(Kernel):
    """torch's memory-efficient attention. Keys and values are repeated for grouped queries."""

    name = "efficient"
    what = "memory-efficient attention, torch's own"
    needs = "torch 2.4"
    DTYPES = (*HALF, torch.float32)
    MAX_HEAD_DIM = None
    FEATURES = frozenset({"dropout", "trees", "spans"})

    def takes(self, head_dim: int, value_dim: int) -> bool:
        """Always: CUTLASS's kernels have two head dimensions."""
        return True

    def available(self) -> tuple[bool, str]:
        """Whether torch has the operator and finds a CUDA device, and the reason if not."""
        return _available()

    @uncompiled
    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        boundaries: Boundaries,
        options: Options,
        scale: float,
    ) -> torch.Tensor:
        """Call the operator's forward."""
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        cu, longest, keys = boundaries.cu_seqlens, boundaries.max_seqlen, boundaries.keys(q.shape[0])
        causal = _CAUSAL if keys.tokens is None else _CAUSAL_FROM_THE_END
        mask = causal if options.causal else _EVERYTHING
        output: torch.Tensor = torch.ops.aten._efficient_attention_forward.default(
            q[None], k[None], v[None], None, cu, keys.cu_seqlens, longest, keys.max_seqlen, options.dropout, mask, True,
            scale=scale,
        )[0]  # fmt: skip
        return output.squeeze(0)  # the derivative of [0] would write zeros, then a copy


@lru_cache(maxsize=1)
def _available() -> tuple[bool, str]:
    found = getattr(torch.ops.aten, "_efficient_attention_forward", None)
    names = {argument.name for argument in found.default._schema.arguments} if found is not None else set()
    if not {"cu_seqlens_q", "max_seqlen_k"} <= names:
        return False, f"torch {torch.__version__} has no _efficient_attention_forward with both longest lengths"
    return (True, "") if torch.cuda.is_available() else (False, "torch finds no CUDA device")
