"""Cascade attention over a tree of segments: no key or value is copied, also where many segments share a parent.

Every segment attends to itself. Besides, at each depth of the tree, the tokens of all descendants of a parent attend to
the parent's keys, in one sequence of a variable-length call. The outputs are merged by their log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ..documents.boundaries import Boundaries
from ..documents.trees import Level


class Varlen(Protocol):
    # A kernel with the log-sum-exp. The keys are those of the batch's segments. If ``causal``, a query sees the keys up
    # to its own token, else all of its segment's keys.

    # It gets the queries of a level. It returns the output ``[queries, heads, dim]``, the log-sum-exp
    # ``[queries, heads]`` and what the backward needs (``kept``).
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, level: Level, causal: bool
    ) -> tuple[Any, ...]: ...

    def backward(
        self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, output: torch.Tensor,
        lse: torch.Tensor, level: Level, causal: bool, kept: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, ...]: ...  # fmt: skip


def levels_of(boundaries: Boundaries) -> list[Level]:
    tree = boundaries.tree
    assert tree is not None
    own = Level(slice(None), boundaries.cu_seqlens, boundaries.max_seqlen, tree.lengths)
    return [own, *tree.levels]


class Cascade(torch.autograd.Function):
    # The first level has the queries of all tokens, and ``causal`` is of that level alone. Windows, softcaps and ALiBi
    # depend on distances along the path, so a kernel gathers keys for them instead.

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, causal: bool,
        levels: Sequence[Level], varlen: Varlen,
    ) -> torch.Tensor:  # fmt: skip
        output, lse, *more = varlen.forward(q, k, v, levels[0], causal)
        kept = [tuple(more)]
        if len(levels) > 1 or sinks is not None:
            output, lse = output.to(lse.dtype), lse.contiguous()
        for level in levels[1:]:
            at = level.tokens
            found, found_lse, *more = varlen.forward(q[at], k, v, level, False)
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
        ctx.causal, ctx.levels, ctx.varlen, ctx.kept = causal, levels, varlen, [len(of_level) for of_level in kept]
        merged_output: torch.Tensor = output
        return merged_output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, output, lse, *rest = ctx.saved_tensors
        of_queries, of_keys, of_values = (torch.zeros_like(x) for x in (q, k, v))
        # Each call gets the merged output and log-sum-exp, as in ring attention (arXiv 2310.01889).
        for number, (level, kept) in enumerate(zip(ctx.levels, ctx.kept)):
            at, causal, own, rest = level.tokens, ctx.causal and number == 0, tuple(rest[:kept]), rest[kept:]
            found = ctx.varlen.backward(grad[at], q[at], k, v, output[at], lse[at], level, causal, own)
            of_queries[at] += found[0]
            of_keys += found[1]
            of_values += found[2]
        of_sinks = None
        if sinks is not None:
            drawn = (grad.to(lse.dtype) * output).sum(-1)
            of_sinks = -((sinks.to(lse.dtype) - lse).exp() * drawn).sum(0).to(sinks.dtype)
        return of_queries, of_keys, of_values, of_sinks, None, None, None
