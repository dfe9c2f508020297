"""The kernels that are operators of torch itself, called by their names in aten. Nothing has to be installed.

FlashAttention 2 is not called by ``torch.nn.attention.varlen``, whose signature changes in almost every release. A call
of the operator as in torch 2.4 works in all later releases, and the operator's schema shows what a release lacks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from .._torch import compiling, uncompiled
from ..documents.boundaries import Boundaries, Keys, document_of
from ..documents.trees import Level
from .cascade import Cascade, levels_of
from .options import Options
from .protocol import AMD, HALF, IN_32_BITS, NVIDIA, OLDER_NVIDIA, Kernel

_FLASH, _FLASH_BACKWARD = "_flash_attention_forward", "_flash_attention_backward"
_CPU_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
_WINDOW = "window_size_left"


@lru_cache(maxsize=4)
def _arguments(operator: str) -> frozenset[str]:
    found = getattr(torch.ops.aten, operator, None)
    return frozenset() if found is None else frozenset(argument.name for argument in found.default._schema.arguments)


class TorchVarlen(Kernel):
    # Sinks, and trees without a window, are computed from the log-sum-exp (cascade.py).

    name = "torch_varlen"
    what = "FlashAttention 2, torch's own build"
    needs = "nothing (windows and sinks: torch 2.4)"
    RUNS_ON = (NVIDIA, AMD)
    FEATURES = frozenset({"window", "sinks", "dropout", "deterministic", "trees", "spans"})
    GATHERS = False
    LARGEST = IN_32_BITS

    def available(self) -> tuple[bool, str]:
        return _flash_runs()

    def features(self) -> frozenset[str]:
        return self.FEATURES if _WINDOW in _arguments(_FLASH) else self.FEATURES - {"window", "sinks"}

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
        flash = _CudaFlash(keys.cu_seqlens, keys.max_seqlen, options.dropout, more)
        own = Level(slice(None), boundaries.cu_seqlens, boundaries.max_seqlen, ())
        if options.sinks is None and (gathers or not tree):
            return flash.call(q, k, v, own, options.causal)[0]
        levels = levels_of(boundaries) if tree and not gathers else [own]
        return Cascade.apply(  # type: ignore[no-untyped-call,no-any-return]
            q, k, v, options.sinks, options.causal, levels, flash
        )


@lru_cache(maxsize=1)
def _flash_runs() -> tuple[bool, str]:
    if not {"cum_seq_q", "max_q"} <= _arguments(_FLASH):
        return False, f"torch {torch.__version__} has no {_FLASH} with cu_seqlens"
    if not torch.cuda.is_available():
        return False, "torch finds no CUDA device"
    if torch.version.hip is None and torch.cuda.get_device_capability() < (8, 0):
        return False, f"{torch.cuda.get_device_name()} is older than Ampere"
    asked = getattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    return (True, "") if asked() else (False, "this torch was built without flash attention")


class _CudaFlash(NamedTuple):
    """FlashAttention 2's operator with its log-sum-exp, for :mod:`.cascade`."""

    cu_seqlens: torch.Tensor  # the ends of each segment's keys
    max_seqlen: int  # the largest number of a segment's keys
    dropout: float
    more: dict[str, Any]  # keywords of the operator

    def call(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, level: Level, causal: bool
    ) -> tuple[torch.Tensor, ...]:
        outputs: tuple[torch.Tensor, ...] = getattr(torch.ops.aten, _FLASH).default(
            q, k, v, level.cu_seqlens, self.cu_seqlens, level.max_seqlen, self.max_seqlen, self.dropout, causal, False,
            **self.more,
        )  # fmt: skip
        return outputs

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, level: Level, causal: bool
    ) -> tuple[torch.Tensor, ...]:
        # The operator's log-sum-exp is ``[heads, queries]`` from torch 2.7 on. Before, and in builds for ROCm, it is
        # padded, ``[segments, heads, max_seqlen]``, and is kept for the backward, which takes it in that layout.
        # ``state`` is what dropout repeats. The log-sum-exp is returned as ``[queries, heads]``.
        output, lse, state, unused, _ = self.call(q, k, v, level, causal)
        if lse.dim() == 2:
            return output, lse.transpose(0, 1), state, unused
        segment, place = _places(level, q.shape[0])
        return output, lse[segment, :, place], state, unused, lse

    def backward(
        self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, output: torch.Tensor,
        lse: torch.Tensor, level: Level, causal: bool, kept: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        state, unused, *padded = kept
        if padded:
            segment, place = _places(level, q.shape[0])
            of_operator = padded[0].clone()
            of_operator[segment, :, place] = lse.to(of_operator.dtype)
        else:
            of_operator = lse.transpose(0, 1).contiguous()
        gradients: tuple[torch.Tensor, ...] = getattr(torch.ops.aten, _FLASH_BACKWARD).default(
            grad, q, k, v, output, of_operator, level.cu_seqlens, self.cu_seqlens, level.max_seqlen, self.max_seqlen,
            self.dropout, causal, state, unused, **self.more,
        )  # fmt: skip
        return gradients


def _places(level: Level, queries: int) -> tuple[torch.Tensor, torch.Tensor]:
    # Each query's segment, and its place in the segment: two int64 tensors ``[queries]``.
    query = torch.arange(queries, device=level.cu_seqlens.device)
    segment = document_of(level.cu_seqlens, queries)
    return segment, query - level.cu_seqlens[segment]


# Values of ``custom_mask_type``: a query sees all keys of its document, or those up to its own position, counted from
# the first or from the last key.
_EVERYTHING, _CAUSAL, _CAUSAL_FROM_THE_END = 0, 1, 2


class Efficient(Kernel):
    # It supports float32 and any head dimension, which the flash kernels do not. It has no windows, because its
    # autograd ignores them: the derivative of ``_efficient_attention_forward`` does not pass them on.

    name = "efficient"
    what = "memory-efficient attention, torch's own"
    needs = "torch 2.4"
    DTYPES = (*HALF, torch.float32)
    MAX_HEAD_DIM = None
    RUNS_ON = (NVIDIA, OLDER_NVIDIA, AMD)
    FEATURES = frozenset({"dropout", "trees", "spans"})

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
        causal = _CAUSAL if keys.tokens is None else _CAUSAL_FROM_THE_END
        mask = causal if options.causal else _EVERYTHING
        output: torch.Tensor = torch.ops.aten._efficient_attention_forward.default(
            q[None], k[None], v[None], None, cu, keys.cu_seqlens, longest, keys.max_seqlen, options.dropout, mask, True,
            scale=scale,
        )[0]  # fmt: skip
        return output.squeeze(0)  # the derivative of [0] would write zeros, then a copy


@lru_cache(maxsize=1)
def _efficient_runs() -> tuple[bool, str]:
    if not {"cu_seqlens_q", "max_seqlen_k"} <= _arguments("_efficient_attention_forward"):
        return False, f"torch {torch.__version__} has no _efficient_attention_forward with both longest lengths"
    return (True, "") if torch.cuda.is_available() else (False, "torch finds no CUDA device")


class CpuFlash(NamedTuple):
    """torch's flash attention for CPUs with its log-sum-exp, one call for each segment, for :mod:`.cascade`."""

    lengths: tuple[int, ...]  # of the keys' segments
    scale: float  # of the logits

    @staticmethod
    def takes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> bool:
        plain = options.features() <= {"sinks"} and q.shape[-1] == v.shape[-1]
        return plain and q.device.type == "cpu" and CPU_FLASH and (CPU_FLASH_GROUPED or q.shape[1] == k.shape[1])

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, level: Level, causal: bool
    ) -> tuple[torch.Tensor, ...]:
        output, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
        operator = getattr(torch.ops.aten, _CPU_FLASH).default
        for queries, keys in self._segments(level):
            of_segment = map(_heads_first, (q[queries], k[keys], v[keys]))
            found, found_lse = operator(*of_segment, 0.0, causal, scale=self.scale)
            output[queries], lse[queries] = found[0].transpose(0, 1), found_lse[0].transpose(0, 1)
        return output, lse

    def backward(
        self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, output: torch.Tensor,
        lse: torch.Tensor, level: Level, causal: bool, kept: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        gradients = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        operator = getattr(torch.ops.aten, f"{_CPU_FLASH}_backward").default
        for queries, keys in self._segments(level):
            states = map(_heads_first, (grad[queries], q[queries], k[keys], v[keys], output[queries]))
            of_lse = lse[queries].transpose(0, 1)[None]
            found = operator(*states, of_lse, 0.0, causal, scale=self.scale)
            for made, at, of_segment in zip(gradients, (queries, keys, keys), found):
                made[at] += of_segment[0].transpose(0, 1)
        return gradients

    def _segments(self, level: Level) -> Iterator[tuple[slice, slice]]:
        for count, queries_end, length, keys_end in zip(
            level.counts, accumulate(level.counts), self.lengths, accumulate(self.lengths)
        ):
            if count and length:
                yield slice(queries_end - count, queries_end), slice(keys_end - length, keys_end)


def _heads_first(states: torch.Tensor) -> torch.Tensor:
    return states.transpose(0, 1)[None]


CPU_FLASH = {"query", "key", "value", "dropout_p", "is_causal", "attn_mask", "scale"} <= _arguments(
    _CPU_FLASH
) and hasattr(torch.ops.aten, f"{_CPU_FLASH}_backward")

# Fewer heads of keys than of queries were seen right in 2.13. In 2.4 the operator's backward writes past the gradients
# of the keys. Releases between were not tried.
CPU_FLASH_GROUPED = bool(torch.__version__ >= (2, 13))  # type: ignore[operator]
