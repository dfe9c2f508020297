"""torch's own ring attention on a CPU: torch registers it for kernels of CUDA only.

So a test can see what context parallelism computes of a packed row without fa2patch, and that it is never asked for a
packed row with fa2patch.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel

ENGINE = inspect.unwrap(context_parallel).__globals__
FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
# the arguments of the backward, in order; those from the fifth on are the ring's own keywords
GIVEN = ("grad_out", "query", "key", "value", "out", "logsumexp", "dropout_p", "is_causal", "attn_mask", "scale")


class Calls:
    forward = 0


def available() -> bool:
    return "custom_ops" in ENGINE and "_templated_ring_attention" in ENGINE


def register() -> None:
    ENGINE["custom_ops"].update({FORWARD: _forward, BACKWARD: _backward})


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _as(value: torch.Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(value, like.device_mesh, like.placements, run_check=False)


def _forward(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, DTensor]:
    Calls.forward += 1
    query, key, value, *more = args
    dropout, causal = [*more, *(0.0, False)[len(more) :]][:2]
    found = ENGINE["_templated_ring_attention"](
        query.device_mesh.get_group(), 2, FORWARD, query=_local(query), key=_local(key), value=_local(value),
        is_causal=kwargs.get("is_causal", causal), dropout_p=kwargs.get("dropout_p", dropout),
        scale=kwargs.get("scale"),
    )  # fmt: skip
    return _as(found[0], query), _as(found[1], query)


def _backward(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    given = {name: _local(value) for name, value in {**dict(zip(GIVEN, args)), **kwargs}.items()}
    assert given.pop("attn_mask", None) is None, "the ring has no mask"

    def of_piece(**piece: Any) -> Any:
        in_order = [piece.pop(name) for name in GIVEN[:8]]
        return BACKWARD(*in_order, **piece)

    grad = given.pop("grad_out")
    found = ENGINE["_templated_ring_attention_backward"](
        args[0].device_mesh.get_group(), 2, of_piece, grad_out=grad, grad_out_name="grad_out", **given
    )
    return tuple(_as(each, args[0]) for each in found)
