"""Whoever gives this process only a part of every row: a patched model refuses to compute there.

A part looks like a row. Context parallelism's holds the head and the tail of one, with ids such as 0, 1, 6, 7, which
restart nowhere and do not go on either; Ulysses' ends inside of a document. What can be looked at is where the
attention of the parts is put together: a function that stands in another's place, DTensor's dispatcher, or the
tokens' own placements.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from .._compile import compiling, constant
from ..errors import PackingNotIsolated

_SPLITTERS = {
    "deepspeed.runtime.sequence_parallel": "DeepSpeed's sequence parallelism (sp_size)",
    "ring_flash_attn": "ring attention (ring_flash_attn)",
    "torch.distributed": "context parallelism (cp_size, torch's context_parallel)",
}
"""Packages whose functions stand in attention's place where rows are split, and what a user knows them by."""


def refuse_split_rows(model: Any, call: dict[str, Any]) -> None:
    """Raise :class:`PackingNotIsolated` where this process holds only a part of every row.

    Nothing is read from a device. In a compiled graph the function in attention's place is an argument of what is
    looked at once, so that another one there makes another graph.
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
def _splitter(sdpa: Any, implementation: Any) -> str:
    table = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", {})
    registered = table[implementation] if isinstance(implementation, str) and implementation in table else None
    for function in (sdpa, registered):
        module = f"{getattr(function, '__module__', '')}."
        for package, name in _SPLITTERS.items():
            if module.startswith(f"{package}."):
                return name
    return _SPLITTERS["torch.distributed"] if _dispatches_parts() else ""


def _dispatches_parts() -> bool:
    """Whether DTensor's attention has been told to gather parts: torch does so while context parallelism is on."""
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    handlers = getattr(getattr(dtensor, "_op_dispatcher", None), "_custom_op_handlers", {})
    return torch.ops.aten._scaled_dot_product_flash_attention.default in handlers


def _shards(call: dict[str, Any]) -> bool:
    for name, along in (("input_ids", 1), ("inputs_embeds", 1), ("position_ids", -1)):
        tokens: Any = call.get(name)
        for axis, placement in enumerate(getattr(tokens, "placements", ())):
            if placement.is_shard(along % tokens.dim()) and tokens.device_mesh.size(axis) > 1:
                return True
    return False
