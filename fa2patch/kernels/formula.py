"""Attention by its definition, one document at a time, in pure torch.

Plain attention over a document is one call of ``scaled_dot_product_attention``, which has a flash kernel on a CPU too.
Windows, softcap, ALiBi, sinks and dropout are computed by the plain formula, in float32 or float64. The cost grows with
the sum of the squared document lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from .._compile import uncompiled

if TYPE_CHECKING:
    from ..documents.boundaries import Boundaries
    from .options import Options


@uncompiled
def over_documents(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, boundaries: Boundaries, options: Options
) -> torch.Tensor:
    """Compute attention document by document.

    Args:
        q: ``[tokens, query heads, head dim]``.
        k: ``[tokens, key heads, head dim]``.
        v: ``[tokens, key heads, value dim]``.
        boundaries: boundaries of the documents; their lengths are read on the host.

    Returns:
        ``[tokens, query heads, value dim]``.
    """
    groups = q.shape[1] // k.shape[1]
    states = queries_of(q, boundaries), keys_of(k, boundaries), keys_of(v, boundaries), last_keys(boundaries, options)
    outputs = [
        attend(query, key, value, options, groups, last).transpose(0, 1) for query, key, value, last in zip(*states)
    ]
    return torch.cat(outputs) if outputs else q.new_zeros(*q.shape[:2], v.shape[2])


def queries_of(states: torch.Tensor, boundaries: Boundaries) -> Sequence[torch.Tensor]:
    """Split states ``[tokens, ...]`` into those of each document, or of each segment of a tree."""
    return torch.split(states, list(boundaries.lengths))


def keys_of(states: torch.Tensor, boundaries: Boundaries) -> Sequence[torch.Tensor]:
    """The states of the keys that each document, or segment, sees: the latter's whole path, root first."""
    tree = boundaries.tree
    if tree is None:
        return queries_of(states, boundaries)
    return [tree.along(states, segment) for segment in range(len(boundaries))]


def last_keys(boundaries: Boundaries, options: Options) -> Sequence[torch.Tensor | None]:
    """For each document the index of the last key that each query sees, int64 ``[length]``; None without spans."""
    if boundaries.until is None or not options.causal:
        return [None] * len(boundaries)
    pieces, at = [], 0
    for until in queries_of(boundaries.until, boundaries):
        pieces.append(until.long() - at)
        at += until.shape[0]
    return pieces


_SHARES_KEYS = "enable_gqa" in (F.scaled_dot_product_attention.__doc__ or "")
"""True from torch 2.5 on. Before, keys and values are repeated, which is costly with many short documents."""


def heads_first(document: tuple[torch.Tensor, ...], groups: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Transpose one document's q, k and v to ``[heads, length, dim]`` and repeat k's and v's heads ``groups`` times."""
    query, key, value = (states.transpose(0, 1) for states in document)
    if groups > 1:
        key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    return query, key, value


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options, groups: int = 1,
    last: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Compute the attention of one document, or of its last queries to all of its keys.

    Args:
        query: ``[queries, query heads, head dim]``.
        key: ``[length, key heads, head dim]``. The last query is at the last key.
        value: ``[length, key heads, value dim]``.
        groups: query heads per key head.
        last: the index of the last key that each query of a document with spans sees, int64 ``[queries]``, or None.

    Returns:
        ``[query heads, queries, value dim]`` of value's dtype.
    """
    length = key.shape[0]
    windowed = options.window is not None and options.window < length
    special = windowed or options.dropout  # reference_op's backward repeats the dropout; sdpa's backends draw others
    if not special and options.softcap is None and options.sinks is None and options.alibi_slopes is None:
        shares = _SHARES_KEYS and groups > 1
        q, k, v = (states[None] for states in heads_first((query, key, value), 1 if shares else groups))
        grouped: dict[str, Any] = {"enable_gqa": True} if shares else {}
        if last is not None:
            grouped["attn_mask"] = torch.arange(length, device=query.device) <= last[:, None]
        elif options.causal and 1 < query.shape[0] < length:
            grouped["attn_mask"] = distances(query.shape[0], length, query.device) >= 0
        else:
            grouped["is_causal"] = options.causal and query.shape[0] > 1
        attended = F.scaled_dot_product_attention(q, k, v, scale=options.scale, **grouped)
        return attended[0].to(value.dtype)
    query, key, value = heads_first((query, key, value), groups)
    with torch.autocast(query.device.type, enabled=False):
        weights = attention_weights(query, key, options, last)[0]
        weights = F.dropout(weights, options.dropout) if options.dropout else weights
        return (weights @ value.to(weights.dtype)).to(value.dtype)


def attention_weights(
    query: torch.Tensor, key: torch.Tensor, options: Options, last: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Compute one document's attention weights in float32 or better.

    Args:
        query: ``[heads, queries, dim]``.
        key: ``[heads, length, dim]``. The last query is at the last key.
        options: ``scale`` must not be None.
        last: as for :func:`attend`.

    Returns:
        Weights ``[heads, queries, length]`` before dropout; ``query index - key index`` ``[queries, length]``; and
        ``tanh(logits / softcap)`` ``[heads, queries, length]``, or None without a softcap.
    """
    assert options.scale is not None, "a kernel's call has settled it, before it pads head dimensions"
    precision = torch.promote_types(query.dtype, torch.float32)
    logits, capped = query.to(precision) @ key.to(precision).transpose(1, 2) * options.scale, None
    if options.softcap is not None:
        capped = torch.tanh(logits / options.softcap)
        logits = options.softcap * capped
    distance = distances(query.shape[1], key.shape[1], query.device)
    if options.alibi_slopes is not None:
        logits = logits - options.alibi_slopes.to(precision)[:, None, None] * distance.abs()
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if last is not None:
        hidden |= torch.arange(key.shape[1], device=query.device) > last[:, None]
    elif options.causal:
        hidden |= distance < 0
    if options.window is not None:
        hidden |= distance.abs() >= options.window
    logits = logits.masked_fill(hidden, float("-inf"))
    if options.sinks is None:
        return logits.softmax(dim=-1), distance, capped
    sink = options.sinks.to(precision)[:, None, None].expand(-1, query.shape[1], 1)
    return torch.cat([logits, sink], dim=-1).softmax(dim=-1)[..., :-1], distance, capped


def distances(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """``query index - key index``, int64 ``[queries, keys]``. The last query is at the last key."""
    index = torch.arange(keys, device=device)
    return index[keys - queries :, None] - index
