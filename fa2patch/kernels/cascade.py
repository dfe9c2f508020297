"""Cascade attention over a tree of segments: no key or value is copied, also where many segments share a parent.

Every segment attends to itself. Besides, at each depth of the tree, the tokens of all descendants of a parent attend to
the parent's keys, in one sequence of a variable-length call. The outputs are merged by their log-sum-exp. The backward
hands the merged output and log-sum-exp to the backward of each call, as ring attention does (arXiv 2310.01889).

An attention sink is one more addend of the merged log-sum-exp: a key without a value, with one logit for each head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from ..documents.boundaries import Boundaries


class Part(NamedTuple):
    """One variable-length call.

    Attributes:
        tokens: the tokens whose queries are computed, int64 ``[queries]`` or a slice of the batch's tokens.
        cu_seqlens: int32 ``[segments + 1]``, the ends of each segment's queries.
        max_seqlen: the largest number of queries of a segment.
        counts: the segments' numbers of queries on the host.
        causal: whether a query sees the keys up to its own token, or all keys of the segment.
    """

    tokens: torch.Tensor | slice
    cu_seqlens: torch.Tensor
    max_seqlen: int
    counts: tuple[int, ...]
    causal: bool

    def of(self, states: torch.Tensor) -> torch.Tensor:
        """The states ``[tokens, ...]`` of this call's queries: a view if their tokens follow each other."""
        return states[self.tokens]


def parts_of(boundaries: Boundaries) -> list[Part]:
    """The calls that a tree of segments needs: one of all segments, and one for each depth that has parents."""
    tree = boundaries.tree
    assert tree is not None
    own = Part(slice(None), boundaries.cu_seqlens, boundaries.max_seqlen, tree.lengths, causal=True)
    return [own, *(Part(*level, causal=False) for level in tree.levels)]


class Varlen(Protocol):
    """A kernel's forward with the log-sum-exp, and its backward. Keys are the segments of the batch.

    ``forward(q, k, v, part)`` returns the output ``[queries, heads, dim]``, the log-sum-exp ``[queries, heads]`` and
    what the backward needs. ``backward(grad, q, k, v, output, lse, part, kept, of_keys, of_values)`` returns the
    gradient of q, and adds those of k and v to its last two arguments.
    """

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Part) -> tuple[Any, ...]: ...

    def backward(
        self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, output: torch.Tensor,
        lse: torch.Tensor, part: Part, kept: tuple[torch.Tensor, ...], of_keys: torch.Tensor, of_values: torch.Tensor,
    ) -> torch.Tensor: ...  # fmt: skip


class Cascade(torch.autograd.Function):
    """``Cascade.apply(q, k, v, sinks, parts, varlen)``. The first part has the queries of all tokens.

    The gradient of a sink is ``-sum over tokens of exp(sink - lse) * (grad . output)``.
    """

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None,
        parts: Sequence[Part], varlen: Varlen,
    ) -> torch.Tensor:  # fmt: skip
        kept = []
        output, lse, *more = varlen.forward(q, k, v, parts[0])
        kept.append(tuple(more))
        if len(parts) > 1 or sinks is not None:
            output, lse = output.to(lse.dtype), lse.contiguous()
        for part in parts[1:]:
            found, found_lse, *more = varlen.forward(part.of(q), k, v, part)
            kept.append(tuple(more))
            before, at = part.of(lse), part.tokens
            both = torch.logaddexp(before, found_lse)
            weights = ((one - both).exp()[..., None] for one in (before, found_lse))
            output[at] = (part.of(output) * next(weights)).addcmul_(found, next(weights))
            lse[at] = both
        if sinks is not None:
            with_sink = torch.logaddexp(lse, sinks.to(lse.dtype))
            output, lse = output * (lse - with_sink).exp()[..., None], with_sink
        output = output.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, output, lse, *(x for of_part in kept for x in of_part))
        ctx.parts, ctx.varlen, ctx.kept = parts, varlen, [len(of_part) for of_part in kept]
        merged_output: torch.Tensor = output
        return merged_output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, output, lse, *rest = ctx.saved_tensors
        of_queries, of_keys, of_values = (torch.zeros_like(x) for x in (q, k, v))
        for part, kept in zip(ctx.parts, ctx.kept):
            own, rest = tuple(rest[:kept]), rest[kept:]
            of_queries[part.tokens] += ctx.varlen.backward(
                part.of(grad), part.of(q), k, v, part.of(output), part.of(lse), part, own, of_keys, of_values
            )
        of_sinks = None
        if sinks is not None:
            drawn = (grad.to(lse.dtype) * output).sum(-1)
            of_sinks = -((sinks.to(lse.dtype) - lse).exp() * drawn).sum(0).to(sinks.dtype)
        return of_queries, of_keys, of_values, of_sinks, None, None
