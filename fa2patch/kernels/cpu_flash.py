"""torch's flash attention for CPUs with its log-sum-exp, one call for each segment, for :mod:`.cascade`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from .cascade import Part

_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
_TAKES = ("query", "key", "value", "dropout_p", "is_causal", "attn_mask", "scale")


def _available() -> bool:
    found = getattr(torch.ops.aten, _FORWARD, None)
    names = {argument.name for argument in found.default._schema.arguments} if found is not None else set()
    return names.issuperset(_TAKES) and hasattr(torch.ops.aten, f"{_FORWARD}_backward")


AVAILABLE = _available()
"""Whether this torch has the operator with the arguments that are passed here."""

GROUPED = bool(torch.__version__ >= (2, 13))  # type: ignore[operator]
"""Whether the operator takes fewer heads of keys than of queries.

Seen right in 2.13. In 2.4 its backward writes past the gradients of the keys. Releases between were not tried.
"""


class CpuFlash(NamedTuple):
    """The operator, segment by segment.

    Attributes:
        lengths: the lengths of the keys' segments.
        scale: the factor of the logits.
    """

    lengths: tuple[int, ...]
    scale: float

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Part) -> tuple[torch.Tensor, ...]:
        """Compute the output ``[queries, heads, dim]`` and the log-sum-exp ``[queries, heads]``."""
        output, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
        operator = getattr(torch.ops.aten, _FORWARD).default
        for queries, keys in self._segments(part):
            of_segment = map(_heads_first, (q[queries], k[keys], v[keys]))
            found, found_lse = operator(*of_segment, 0.0, part.causal, scale=self.scale)
            output[queries], lse[queries] = found[0].transpose(0, 1), found_lse[0].transpose(0, 1)
        return output, lse

    def backward(
        self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, output: torch.Tensor,
        lse: torch.Tensor, part: Part, kept: tuple[torch.Tensor, ...], of_keys: torch.Tensor, of_values: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Compute the gradient of q, and add those of k and v to ``of_keys`` and ``of_values``."""
        of_queries = torch.zeros_like(q)
        operator = getattr(torch.ops.aten, f"{_FORWARD}_backward").default
        for queries, keys in self._segments(part):
            states = map(_heads_first, (grad[queries], q[queries], k[keys], v[keys], output[queries]))
            of_lse = lse[queries].transpose(0, 1)[None]
            found = operator(*states, of_lse, 0.0, part.causal, scale=self.scale)
            for made, at, of_segment in zip((of_queries, of_keys, of_values), (queries, keys, keys), found):
                made[at] += of_segment[0].transpose(0, 1)
        return of_queries

    def _segments(self, part: Part) -> Iterator[tuple[slice, slice]]:
        """The queries and the keys of each segment that has both."""
        for count, queries_end, length, keys_end in zip(
            part.counts, accumulate(part.counts), self.lengths, accumulate(self.lengths)
        ):
            if count and length:
                yield slice(queries_end - count, queries_end), slice(keys_end - length, keys_end)


def _heads_first(states: torch.Tensor) -> Any:
    return states.transpose(0, 1)[None]
