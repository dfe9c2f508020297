"""What processes send each other. Under Ulysses these are operators that keep a compiled model's graph whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..._torch import HAS_OPERATORS, operator_later, uncompiled

groups: dict[str, Any] = {}  # process groups by their group_name, because operators take no objects


def _exchanged(pieces: torch.Tensor, group: str) -> torch.Tensor:
    pieces = pieces.contiguous()
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces, group=groups[group])
    return received


@uncompiled
def _whole_rows(values: torch.Tensor, group: str, processes: int) -> torch.Tensor:
    values = values.contiguous()
    parts = [torch.empty_like(values) for _ in range(processes)]
    dist.all_gather(parts, values, group=groups[group])
    return torch.cat(parts, dim=-1)


operator_later(
    "exchange",
    _exchanged,
    "(Tensor pieces, str group) -> Tensor",
    lambda pieces, group: pieces.new_empty(pieces.shape),
    lambda ctx, gradient: (exchange(gradient, ctx.group), None),
    lambda ctx, inputs, output: setattr(ctx, "group", inputs[1]),
)
operator_later(
    "whole_rows",
    _whole_rows,
    "(Tensor values, str group, int processes) -> Tensor",
    lambda values, group, processes: values.new_empty(*values.shape[:-1], values.shape[-1] * processes),
)


def exchange(pieces: torch.Tensor, group: str) -> torch.Tensor:
    # The n-th piece along the first dim goes to the n-th process, and one comes from each. Gradients take the way back.
    if HAS_OPERATORS:
        received: torch.Tensor = torch.ops.fa2patch.exchange.default(pieces, group)
        return received
    each = [1] * pieces.shape[0]
    return send(pieces, each, each, group)


def whole_rows(values: torch.Tensor, group: str, processes: int) -> torch.Tensor:
    # Parts are [..., length], of one length. There is no gradient.
    gather = torch.ops.fa2patch.whole_rows.default if HAS_OPERATORS else _whole_rows
    whole: torch.Tensor = gather(values, group, processes)
    return whole


@uncompiled
def send(states: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: str) -> torch.Tensor:
    # `states` [tokens, ...] are those for the first process, then those for the second. There are as many as `sent`
    # says for each; the result has as many as `received` says from each. Gradients take the way back.
    found: torch.Tensor = _Sent.apply(states, sent, received, group)  # type: ignore[no-untyped-call]
    return found


class _Sent(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: str
    ) -> torch.Tensor:
        ctx.way_back = received, sent, group
        return _sent(states, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return _sent(gradient, *ctx.way_back), None, None, None


def _sent(states: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: str) -> torch.Tensor:
    found = states.new_empty(sum(received), *states.shape[1:])
    dist.all_to_all_single(found, states.contiguous(), [*received], [*sent], group=groups[group])
    return found
