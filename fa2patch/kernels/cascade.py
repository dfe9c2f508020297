"""Cascade attention over a tree of segments: no key or value is copied, also where many segments share a parent.

Every segment attends to itself. Besides, at each depth of the tree, the tokens of all descendants of a parent attend to
the parent's keys, in one sequence of a variable-length call. The outputs are merged by their log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from ..documents.boundaries import Boundaries, document_of
from ..documents.trees import Level
from .options import Options

FLASH, _FLASH_BACKWARD = "_flash_attention_forward", "_flash_attention_backward"
_CPU_FLASH = "_scaled_dot_product_flash_attention_for_cpu"


@lru_cache(maxsize=4)
def arguments_of(operator: str) -> frozenset[str]:
    found = getattr(torch.ops.aten, operator, None)
    return frozenset() if found is None else frozenset(argument.name for argument in found.default._schema.arguments)


def levels_of(boundaries: Boundaries) -> list[Level]:
    tree = boundaries.tree
    assert tree is not None
    own = Level(slice(None), boundaries.cu_seqlens, boundaries.max_seqlen, tree.lengths)
    return [own, *tree.levels]


class Cascade(torch.autograd.Function):
    # The first level has the queries of all tokens, and ``causal`` is of that level alone. Windows, softcaps and ALiBi
    # depend on distances along the path, so a kernel gathers keys for them instead.
    #
    # ``flash`` gets the queries of a level and the keys of all segments. A query sees the keys up to its own token if
    # ``causal``, else all of its segment's. The forward returns the output ``[queries, heads, dim]``, the log-sum-exp
    # ``[queries, heads]`` and what the backward needs (``kept``).

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, causal: bool,
        levels: Sequence[Level], flash: CudaFlash | CpuFlash,
    ) -> torch.Tensor:  # fmt: skip
        output, lse, *more = flash.forward(q, k, v, levels[0], causal)
        kept = [tuple(more)]
        if len(levels) > 1 or sinks is not None:
            output, lse = output.to(lse.dtype), lse.contiguous()
        for level in levels[1:]:
            at = level.tokens
            found, found_lse, *more = flash.forward(q[at], k, v, level, False)
            kept.append(tuple(more))
            before = lse[at]
            both = torch.logaddexp(before, found_lse)
            weights = ((one - both).exp()[..., None] for one in (before, found_lse))
            output[at] = (output[at] * next(weights)).addcmul_(found, next(weights))
            lse[at] = both
        if sinks is not None:
            # A sink is one more addend of the log-sum-exp: a key without a value, with one logit for each head.
            with_sink = torch.logaddexp(lse, sinks.to(lse.dtype))
            output, lse = output * (lse - with_sink).exp()[..., None], with_sink
        output = output.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, output, lse, *(x for of_level in kept for x in of_level))
        ctx.causal, ctx.levels, ctx.flash, ctx.kept = causal, levels, flash, [len(of_level) for of_level in kept]
        merged_output: torch.Tensor = output
        return merged_output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, output, lse, *rest = ctx.saved_tensors
        of_queries, of_keys, of_values = (torch.zeros_like(x) for x in (q, k, v))
        # Each call gets the merged output and log-sum-exp, as in ring attention (arXiv 2310.01889).
        for number, (level, kept) in enumerate(zip(ctx.levels, ctx.kept)):
            at, causal, own, rest = level.tokens, ctx.causal and number == 0, tuple(rest[:kept]), rest[kept:]
            found = ctx.flash.backward(grad[at], q[at], k, v, output[at], lse[at], level, causal, own)
            of_queries[at] += found[0]
            of_keys += found[1]
            of_values += found[2]
        of_sinks = None
        if sinks is not None:
            drawn = (grad.to(lse.dtype) * output).sum(-1)
            of_sinks = -((sinks.to(lse.dtype) - lse).exp() * drawn).sum(0).to(sinks.dtype)
        return of_queries, of_keys, of_values, of_sinks, None, None, None


class CudaFlash(NamedTuple):
    """FlashAttention 2's operator with its log-sum-exp."""

    cu_seqlens: torch.Tensor  # the ends of each segment's keys
    max_seqlen: int  # the largest number of a segment's keys
    dropout: float
    more: dict[str, Any]  # keywords of the operator

    def call(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, level: Level, causal: bool
    ) -> tuple[torch.Tensor, ...]:
        outputs: tuple[torch.Tensor, ...] = getattr(torch.ops.aten, FLASH).default(
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


class CpuFlash(NamedTuple):
    """torch's flash attention for CPUs with its log-sum-exp, one call for each segment."""

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


CPU_FLASH = {"query", "key", "value", "dropout_p", "is_causal", "attn_mask", "scale"} <= arguments_of(
    _CPU_FLASH
) and hasattr(torch.ops.aten, f"{_CPU_FLASH}_backward")

# Fewer heads of keys than of queries were seen right in 2.13. In 2.4 the operator's backward writes past the gradients
# of the keys. Releases between were not tried.
CPU_FLASH_GROUPED = bool(torch.__version__ >= (2, 13))  # type: ignore[operator]
