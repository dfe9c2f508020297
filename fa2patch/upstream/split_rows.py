"""Refuse sequence and context parallelism, where this process holds only a part of every row.

A part looks like a whole row. With context parallelism it holds the head and the tail of a row, with ids such as
0, 1, 6, 7. With Ulysses it may end inside a document. Such a split is recognised by a replaced attention function, by
DTensor's dispatcher, or by the placements of the tokens.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from .._compile import compiling, constant
from .._types import Call, Function, Model
from ..errors import PackingNotIsolated
from .seams.interface import registered

_SPLITTERS = {
    "deepspeed.runtime.sequence_parallel": "DeepSpeed's sequence parallelism (sp_size)",
    "ring_flash_attn": "ring attention (ring_flash_attn)",
    "torch.distributed": "context parallelism (cp_size, torch's context_parallel)",
}
"""Packages that replace the attention function when rows are split, with their names for users."""


def refuse_split_rows(model: Model, call: Call) -> None:
    """Raise :class:`PackingNotIsolated` if this process holds only a part of every row.

    Nothing is read from a device. In a compiled graph the check runs once. The attention function is an argument of
    the check, so that replacing the function makes a new graph.
    """
    sdpa = torch.nn.functional.scaled_dot_product_attention
    splitter = _splitter(sdpa, getattr(model.config, "_attn_implementation", None))
    if not splitter and not compiling() and _shards(call):
        splitter = "a sharding of the tokens along the row (DTensor)"
    if splitter:
        raise PackingNotIsolated(
            f"{splitter} is on: this process holds only a part of every row, so documents that are cut would be "
            "computed wrong. Train without it, or revert the patch and train padded."
        )


@constant
def _splitter(sdpa: Function, implementation: object) -> str:
    for function in (sdpa, registered(implementation)):
        module = f"{getattr(function, '__module__', '')}."
        for package, name in _SPLITTERS.items():
            if module.startswith(f"{package}."):
                return name
    return _SPLITTERS["torch.distributed"] if _dispatches_parts() else ""


def _dispatches_parts() -> bool:
    """Whether DTensor has a handler for flash attention, which torch installs while context parallelism is on."""
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    handlers = getattr(getattr(dtensor, "_op_dispatcher", None), "_custom_op_handlers", {})
    return torch.ops.aten._scaled_dot_product_flash_attention.default in handlers


def _shards(call: Call) -> bool:
    for name, along in (("input_ids", 1), ("inputs_embeds", 1), ("position_ids", -1)):
        tokens: Any = call.get(name)
        for axis, placement in enumerate(getattr(tokens, "placements", ())):
            if placement.is_shard(along % tokens.dim()) and tokens.device_mesh.size(axis) > 1:
                return True
    return False
