"""The mathematics of the reference: attention by its definition, a few documents at a time, in pure torch.

Plain attention over a document is one call of ``scaled_dot_product_attention``, which has a flash kernel on a CPU too.
Windows, softcap, ALiBi, sinks and dropout are computed by the plain formula, in float32 or float64. The cost grows with
the sum of the squared document lengths. Short documents share a call (:mod:`.grouping`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .._torch import uncompiled
from ..documents.boundaries import Boundaries
from ..documents.trees import Tree
from .grouping import Documents, documents_of
from .protocol import Options


class TreeLayout(NamedTuple):
    """The counterpart of :class:`.grouping.Documents` for a tree: one call for each segment.

    Attributes:
        tree: the segments and what each continues.
    """

    tree: Tree

    @property
    def last(self) -> tuple[None, ...]:
        """No query sees a later key."""
        return (None,) * len(self.tree.lengths)

    def split(self, states: torch.Tensor) -> Sequence[torch.Tensor]:
        """Split states ``[tokens, ...]`` into those of each segment, ``[1, length, ...]``."""
        return [piece[None] for piece in torch.split(states, list(self.tree.lengths))]

    def keys(self, states: torch.Tensor) -> Sequence[torch.Tensor]:
        """The states ``[tokens, ...]`` of each segment's path, the root first: ``[1, length of the path, ...]``."""
        return [self.tree.along(states, segment)[None] for segment in range(len(self.tree.lengths))]

    def join(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join the segments' results ``[1, length, ...]`` to ``[tokens, ...]``."""
        return torch.cat([piece[0] for piece in pieces])

    def summed(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """The gradient of the states that :meth:`keys` splits. A segment is on the paths of all that continue it."""
        tree = self.tree
        whole = pieces[0].new_zeros(sum(tree.lengths), *pieces[0].shape[2:])
        for segment, found in enumerate(pieces):
            path = tree.path(segment)
            for one, piece in zip(path, torch.split(found[0], [tree.lengths[one] for one in path])):
                whole[slice(*tree.span(one))] += piece
        return whole


class Call(NamedTuple):
    """The states of the documents that are computed at once, all of the same length.

    Attributes:
        queries: ``[documents, queries, query heads, head dim]``. The last query is at the last key.
        keys: ``[documents, length, key heads, head dim]``.
        values: ``[documents, length, key heads, value dim]``.
        last: the index of the last key that each query sees, int64 ``[documents, queries]``. None if the options
            say which keys a query sees.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    last: torch.Tensor | None = None


@uncompiled
def over_documents(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, boundaries: Boundaries, options: Options
) -> torch.Tensor:
    """Attention within documents, ``[tokens, query heads, value dim]``, from q, k and v as a kernel gets them.

    The documents' lengths are read on the host.
    """
    sinks, slopes = options.sinks, options.alibi_slopes
    if sinks is not None or slopes is not None:
        exact = torch.promote_types(q.dtype, torch.float32)  # in it, their gradients are added up over the calls
        sinks, slopes = (x if x is None else x.to(exact) for x in (sinks, slopes))
        options = replace(options, sinks=sinks, alibi_slopes=slopes)
    layout, each_call = divided(q, k, v, boundaries, options)
    outputs = [attend(call, options).transpose(1, 2) for call in each_call]
    return layout.join(outputs) if outputs else q.new_zeros(*q.shape[:2], v.shape[2])


def divided(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, boundaries: Boundaries, options: Options
) -> tuple[Documents | TreeLayout, list[Call]]:
    """How the documents, or the segments of a tree, are divided into calls, and these calls."""
    layout: Documents | TreeLayout
    if boundaries.tree is not None:
        layout = TreeLayout(boundaries.tree)
    else:
        layout = documents_of(boundaries, q.shape[1] * q.shape[2], options.causal)
    return layout, list(map(Call, layout.split(q), layout.keys(k), layout.keys(v), layout.last))


_SHARES_KEYS = "enable_gqa" in (F.scaled_dot_product_attention.__doc__ or "")
"""True from torch 2.5 on. Before, keys and values are repeated, which is costly with many short documents."""


def heads_first(call: Call, groups: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The states of a call as ``[documents, heads, length, dim]``. Heads of keys and values occur ``groups`` times."""
    query, key, value = call.queries.transpose(1, 2), call.keys.transpose(1, 2), call.values.transpose(1, 2)
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return query, key, value


def attend(call: Call, options: Options) -> torch.Tensor:
    """The attention of the documents of a call, or of their last queries to all of their keys.

    Returns:
        ``[documents, query heads, queries, value dim]`` of the values' dtype.
    """
    length, groups = call.keys.shape[1], call.queries.shape[2] // call.keys.shape[2]
    windowed = options.window is not None and options.window < length
    special = windowed or options.dropout  # the operator's backward repeats the dropout; sdpa's backends draw others
    if not special and options.softcap is None and options.sinks is None and options.alibi_slopes is None:
        shares = _SHARES_KEYS and groups > 1
        asked = {**_visible(call, options), "scale": options.scale, **({"enable_gqa": True} if shares else {})}
        query, key, value = heads_first(call, 1 if shares else groups)
        return F.scaled_dot_product_attention(query, key, value, **asked).to(call.values.dtype)
    query, key, value = heads_first(call, groups)
    with torch.autocast(query.device.type, enabled=False):
        weights = attention_weights(query, key, options, call.last)[0]
        weights = F.dropout(weights, options.dropout) if options.dropout else weights
        return (weights @ value.to(weights.dtype)).to(value.dtype)


def _visible(call: Call, options: Options) -> dict[str, Any]:
    """The keywords of ``scaled_dot_product_attention`` that say which keys a query sees."""
    queries, length, device = call.queries.shape[1], call.keys.shape[1], call.queries.device
    if call.last is not None:
        return {"attn_mask": torch.arange(length, device=device) <= call.last[:, None, :, None]}
    if options.causal and 1 < queries < length:
        return {"attn_mask": _distances(queries, length, device) >= 0}
    return {"is_causal": options.causal and queries > 1}


def attention_weights(
    query: torch.Tensor, key: torch.Tensor, options: Options, last: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Compute the attention weights of a call in float32 or better.

    Args:
        query: ``[documents, heads, queries, dim]``.
        key: ``[documents, heads, length, dim]``. The last query is at the last key.
        options: ``scale`` must not be None.
        last: as in :class:`Call`.

    Returns:
        Weights ``[documents, heads, queries, length]`` before dropout; ``query index - key index``
        ``[queries, length]``; and ``tanh(logits / softcap)`` of the weights' shape, or None without a softcap.
    """
    assert options.scale is not None, "a kernel's call has settled it, before it pads head dimensions"
    precision = torch.promote_types(query.dtype, torch.float32)
    logits, capped = query.to(precision) @ key.to(precision).transpose(-1, -2) * options.scale, None
    if options.softcap is not None:
        capped = torch.tanh(logits / options.softcap)
        logits = options.softcap * capped
    distance = _distances(query.shape[2], key.shape[2], query.device)
    if options.alibi_slopes is not None:
        logits = logits - options.alibi_slopes.to(precision)[:, None, None] * distance.abs()
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if last is not None:
        hidden = hidden | (torch.arange(key.shape[2], device=query.device) > last[:, None, :, None])
    elif options.causal:
        hidden = hidden | (distance < 0)
    if options.window is not None:
        hidden = hidden | (distance.abs() >= options.window)
    logits = logits.masked_fill(hidden, float("-inf"))
    if options.sinks is None:
        return logits.softmax(dim=-1), distance, capped
    sink = options.sinks.to(precision)[:, None, None].expand(len(query), -1, query.shape[2], 1)
    return torch.cat([logits, sink], dim=-1).softmax(dim=-1)[..., :-1], distance, capped


def _distances(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """``query index - key index``, int64 ``[queries, keys]``. The last query is at the last key."""
    index = torch.arange(keys, device=device)
    return index[keys - queries :, None] - index
