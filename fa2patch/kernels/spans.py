"""Spans by a second call of a kernel: causal attention for all tokens, then the queries of the spans again.

In the second call, each span's queries see all keys of their document up to the span's end, which are gathered. Its
output takes the place of the first call's. A window hides nothing of a span from its queries, because it may not be
shorter than the span (:func:`require_within`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Callable

import torch

from .._torch import compiling, uncompiled
from ..documents.boundaries import Boundaries, Keys
from ..documents.device import require
from ..errors import PackingNotIsolated

if TYPE_CHECKING:
    from .options import Options

Attend = Callable[..., torch.Tensor]


@dataclass(eq=False)
class _OfSpans(Boundaries):
    """The boundaries of the second call: of each span's queries, and of its keys."""

    of_keys: Keys | None = None

    def keys(self, tokens: int) -> Keys:
        """The ends of each span's keys. They have been gathered."""
        assert self.of_keys is not None
        return self.of_keys


@uncompiled
def with_spans(
    attend: Attend, output: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, boundaries: Boundaries,
    options: Options, scale: float,
) -> torch.Tensor:  # fmt: skip
    """Compute the queries of the spans again, and put them into the output of the first call.

    Args:
        attend: the kernel's :meth:`~.protocol.Kernel.attend`. It takes the keys' ends from ``boundaries.keys``.
        output: the output of the first call, ``[tokens, query heads, value head dim]``.
        q, k, v, options, scale: as in the first call.
        boundaries: boundaries with spans.
    """
    spans = boundaries.spans
    if spans is None or not spans.counts:
        return output
    if _OfSpans not in boundaries.made:
        device = output.device
        ends, key_ends = (torch.tensor([0, *n]).cumsum(0).to(device, torch.int32) for n in spans[2:])
        of_keys = Keys(None, key_ends, max(spans.key_counts))
        queries = _OfSpans(ends, spans.longest, None, spans.counts, of_keys=of_keys)
        boundaries.made[_OfSpans] = queries, *(torch.from_numpy(tokens).to(device) for tokens in spans[:2])
    queries, at, seen = boundaries.made[_OfSpans]
    states = q.index_select(0, at), k.index_select(0, seen), v.index_select(0, seen)
    found = attend(*states, queries, replace(options, causal=False), scale)
    return output.index_copy(0, at, found.to(output.dtype))


def require_within(window: int, boundaries: Boundaries) -> None:
    """Raise :class:`PackingNotIsolated` if a span is longer than a sliding window.

    Upstream's releases differ in what such a window hides inside a span.

    Args:
        window: the window in tokens.
        boundaries: the boundaries with the spans.
    """
    message = (
        "a picture (or a prefix) whose tokens see each other in both directions is longer than the sliding window of "
        "{} tokens, and releases of Transformers differ in what that hides. Use smaller pictures or shorter prefixes, "
        "or train padded."
    )
    if boundaries.until is not None and compiling():
        token = torch.arange(boundaries.until.shape[0], device=boundaries.until.device)
        require(((boundaries.until - token) < window).all(), PackingNotIsolated, message, window)
    elif boundaries.spans is not None and boundaries.spans.longest > window:
        raise PackingNotIsolated(message.format(window))
