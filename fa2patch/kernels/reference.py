"""The truth that every kernel is held against: pure torch, one document at a time, on every device and dtype.

Cost grows with the sum of squared document lengths. Where a layer asks for nothing special, each document is one call
of ``scaled_dot_product_attention``, which has a flash kernel also on a CPU; the rest is the plain formula in float32
(or float64), so that windows, softcap, alibi and sinks are what their definitions say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from .._compile import uncompiled

if TYPE_CHECKING:
    from ..attention import Options
    from ..boundaries import Boundaries


class Reference:
    """Loops over documents; needs their lengths on the host (on a GPU one read per forward)."""

    name = "reference"

    def available(self) -> tuple[bool, str]:
        return True, ""

    def supports(self, q: torch.Tensor, v: torch.Tensor, options: Options) -> tuple[bool, str]:
        return True, ""

    @uncompiled
    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, boundaries: Boundaries, options: Options
    ) -> torch.Tensor:
        lengths = list(boundaries.lengths)
        groups = q.shape[1] // k.shape[1]
        outputs = [
            _attend(*_heads_first(document, groups), options).transpose(0, 1)
            for document in zip(*(torch.split(states, lengths) for states in (q, k, v)))
        ]
        return torch.cat(outputs) if outputs else q.new_zeros(*q.shape[:2], v.shape[2])


def _heads_first(document: tuple[torch.Tensor, ...], groups: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of one document, ``[heads, length, dim]`` each, with as many key as query heads."""
    query, key, value = (states.transpose(0, 1) for states in document)
    if groups > 1:
        key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    return query, key, value


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options) -> torch.Tensor:
    """One document, ``[heads, length, dim]`` each."""
    length = query.shape[1]
    windowed = options.window is not None and options.window < length
    if not windowed and options.softcap is None and options.sinks is None and options.alibi_slopes is None:
        attended: torch.Tensor = F.scaled_dot_product_attention(
            query[None],
            key[None],
            value[None],
            dropout_p=options.dropout,
            is_causal=options.causal and length > 1,
            scale=options.scale,
        )
        return attended[0].to(value.dtype)
    precision = torch.promote_types(query.dtype, torch.float32)
    scale = query.shape[2] ** -0.5 if options.scale is None else options.scale
    with torch.autocast(query.device.type, enabled=False):
        logits = query.to(precision) @ key.to(precision).transpose(1, 2) * scale
        if options.softcap is not None:
            logits = options.softcap * torch.tanh(logits / options.softcap)
        index = torch.arange(length, device=query.device)
        distance = index[:, None] - index
        if options.alibi_slopes is not None:
            logits = logits - options.alibi_slopes.to(precision)[:, None, None] * distance.abs()
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if options.causal:
            hidden |= distance < 0
        if options.window is not None:
            hidden |= distance.abs() >= options.window
        logits = logits.masked_fill(hidden, float("-inf"))
        if options.sinks is not None:
            sink = options.sinks.to(precision)[:, None, None].expand(-1, length, 1)
            weights = torch.cat([logits, sink], dim=-1).softmax(dim=-1)[..., :-1]
        else:
            weights = logits.softmax(dim=-1)
        weights = F.dropout(weights, options.dropout) if options.dropout else weights
        return (weights @ value.to(precision)).to(value.dtype)
