"""The kernels that are operators of torch itself, called by their names in aten. Nothing has to be installed.

FlashAttention 2 is not called by ``torch.nn.attention.varlen``, whose signature changes in almost every release. A call
of the operator as in torch 2.4 works in all later releases, and the operator's schema shows what a release lacks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from .._torch import compiling, uncompiled
from ..documents.boundaries import Boundaries, Keys
from ..documents.trees import Level
from .cascade import FLASH, Cascade, CudaFlash, arguments_of, levels_of
from .options import Options
from .protocol import AMD, HALF, IN_32_BITS, NVIDIA, OLDER_NVIDIA, Kernel

_WINDOW = "window_size_left"


class TorchVarlen(Kernel):
    # Sinks, and trees without a window, are computed from the log-sum-exp (cascade.py).

    name = "torch_varlen"
    what = "FlashAttention 2, torch's own build"
    needs = "nothing (windows and sinks: torch 2.4)"
    RUNS_ON = (NVIDIA, AMD)
    FEATURES = frozenset({"window", "sinks", "dropout", "deterministic", "trees", "spans", "pairs"})
    GATHERS = False
    LARGEST = IN_32_BITS

    def available(self) -> tuple[bool, str]:
        return _flash_runs()

    def features(self) -> frozenset[str]:
        return self.FEATURES if _WINDOW in arguments_of(FLASH) else self.FEATURES - {"window", "sinks"}

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, boundaries: Boundaries, options: Options, scale: float
    ) -> torch.Tensor:
        keys, tree = boundaries.keys(q.shape[0]), boundaries.parents is not None
        gathers = tree and (options.window is not None or compiling())  # a graph holds no tree of the host
        if gathers and keys.tokens is not None:
            k, v = k.index_select(0, keys.tokens), v.index_select(0, keys.tokens)
        elif tree:
            keys = Keys(None, boundaries.cu_seqlens, boundaries.max_seqlen)
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        more: dict[str, Any] = {"scale": scale}
        if options.window is not None:
            reach = options.window - 1
            more.update({_WINDOW: reach, "window_size_right": 0 if options.causal else reach})
        flash = CudaFlash(keys.cu_seqlens, keys.max_seqlen, options.dropout, more)
        own = Level(slice(None), boundaries.cu_seqlens, boundaries.max_seqlen, ())
        if options.sinks is None and (gathers or not tree):
            return flash.call(q, k, v, own, options.causal)[0]
        levels = levels_of(boundaries) if tree and not gathers else [own]
        return Cascade.apply(  # type: ignore[no-untyped-call,no-any-return]
            q, k, v, options.sinks, options.causal, levels, flash
        )


@lru_cache(maxsize=1)
def _flash_runs() -> tuple[bool, str]:
    if not {"cum_seq_q", "max_q"} <= arguments_of(FLASH):
        return False, f"torch {torch.__version__} has no {FLASH} with cu_seqlens"
    if not torch.cuda.is_available():
        return False, "torch finds no CUDA device"
    if torch.version.hip is None and torch.cuda.get_device_capability() < (8, 0):
        return False, f"{torch.cuda.get_device_name()} is older than Ampere"
    asked = getattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    return (True, "") if asked() else (False, "this torch was built without flash attention")


# Values of ``custom_mask_type``: a query sees all keys of its document, or those up to its own position, counted from
# the first or from the last key.
_EVERYTHING, _CAUSAL, _CAUSAL_FROM_THE_END = 0, 1, 2


class Efficient(Kernel):
    # It supports float32 and any head dimension, which the flash kernels do not. It has no windows, because its
    # autograd ignores them: the derivative of ``_efficient_attention_forward`` does not pass them on. It has no bias,
    # because its backward refuses one beside cu_seqlens ("CuSeqlen + bias not implemented yet", kernel_backward.h), and
    # its shape would be that of the row squared.

    name = "efficient"
    what = "memory-efficient attention, torch's own"
    needs = "torch 2.4"
    DTYPES = (*HALF, torch.float32)
    MAX_HEAD_DIM = None
    RUNS_ON = (NVIDIA, OLDER_NVIDIA, AMD)
    FEATURES = frozenset({"dropout", "trees", "spans", "pairs"})

    def takes(self, head_dim: int, value_dim: int) -> bool:
        # CUTLASS's kernels have two head dimensions.
        return True

    def available(self) -> tuple[bool, str]:
        return _efficient_runs()

    @uncompiled
    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, boundaries: Boundaries, options: Options, scale: float
    ) -> torch.Tensor:
        if (groups := q.shape[1] // k.shape[1]) > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        cu, longest, keys = boundaries.cu_seqlens, boundaries.max_seqlen, boundaries.keys(q.shape[0])
        others = keys.tokens is not None or boundaries.sources is not None
        causal = _CAUSAL_FROM_THE_END if others else _CAUSAL
        mask = causal if options.causal else _EVERYTHING
        output: torch.Tensor = torch.ops.aten._efficient_attention_forward.default(
            q[None], k[None], v[None], None, cu, keys.cu_seqlens, longest, keys.max_seqlen, options.dropout, mask, True,
            scale=scale,
        )[0]  # fmt: skip
        return output.squeeze(0)  # the derivative of [0] would write zeros, then a copy


@lru_cache(maxsize=1)
def _efficient_runs() -> tuple[bool, str]:
    if not {"cu_seqlens_q", "max_seqlen_k"} <= arguments_of("_efficient_attention_forward"):
        return False, f"torch {torch.__version__} has no _efficient_attention_forward with both longest lengths"
    return (True, "") if torch.cuda.is_available() else (False, "torch finds no CUDA device")
