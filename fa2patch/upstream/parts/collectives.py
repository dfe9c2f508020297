"""What processes that share rows send each other, as operators (``fa2patch::exchange``, ``fa2patch::whole_rows``).

An operator keeps a compiled model's graph whole. This needs ``torch.library.custom_op``, which torch has from 2.4 on.
With older versions the graph breaks. A process group is named by its ``group_name``, as operators take no objects.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
import torch.distributed as dist

from ..._torch import HAS_OPERATORS, uncompiled

_groups: dict[str, Any] = {}


def named(group: Any) -> str:
    """Register a process group; return its name."""
    _groups[group.group_name] = group
    return str(group.group_name)


def group_of(name: str) -> Any:
    """The process group of this name."""
    return _groups[name]


def _exchanged(pieces: torch.Tensor, group: str) -> torch.Tensor:
    pieces = pieces.contiguous()
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces, group=_groups[group])
    return received


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pieces: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return _exchanged(pieces, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchanged(gradients[0], ctx.group), None


@uncompiled
def _differentiable(pieces: torch.Tensor, group: str) -> torch.Tensor:
    received: torch.Tensor = _Exchange.apply(pieces, group)  # type: ignore[no-untyped-call]
    return received


@uncompiled
def _whole_rows(values: torch.Tensor, group: str, processes: int) -> torch.Tensor:
    values = values.contiguous()
    parts = [torch.empty_like(values) for _ in range(processes)]
    dist.all_gather(parts, values, group=_groups[group])
    return torch.cat(parts, dim=-1)


exchange: Callable[[torch.Tensor, str], torch.Tensor] = _differentiable
"""Called as ``exchange(pieces, group)``: send the n-th piece along the first dim to the n-th process, and receive one
of each. The gradient takes the way back."""

whole_rows: Callable[[torch.Tensor, str, int], torch.Tensor] = _whole_rows
"""Called as ``whole_rows(values, group, processes)``: gather the parts ``[..., length]`` to whole rows. It has no
gradient."""

if HAS_OPERATORS:
    exchange = _op = torch.library.custom_op(
        "fa2patch::exchange", _exchanged, mutates_args=(), schema="(Tensor pieces, str group) -> Tensor"
    )
    _op.register_fake(lambda pieces, group: pieces.new_empty(pieces.shape))
    _op.register_autograd(
        lambda ctx, gradient: (exchange(gradient, ctx.group), None),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "group", inputs[1]),
    )
    whole_rows = torch.library.custom_op(
        "fa2patch::whole_rows",
        _whole_rows,
        mutates_args=(),
        schema="(Tensor values, str group, int processes) -> Tensor",
    )
    whole_rows.register_fake(
        lambda values, group, processes: values.new_empty(*values.shape[:-1], values.shape[-1] * processes)
    )
