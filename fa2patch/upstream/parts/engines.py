"""Engines that split rows over processes: Ulysses is taken, the others are refused.

A part looks like a whole row. With context parallelism it holds the head and the tail of a row, with ids such as
0, 1, 6, 7. With Ulysses it may end inside a document. Such a split is recognised by a replaced attention function, by
DTensor's dispatcher, or by the placements of the tokens.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ..._torch import compiling, constant
from ..._types import Call, Function, Model
from ...errors import PackingNotIsolated
from .. import inspecting
from ..seams.interface import any_registered, registered
from . import collectives
from .row_part import RowPart

FLASH = "_flash_attention_forward"

PACKAGE = "deepspeed.runtime.sequence_parallel"
_CLASS = "UlyssesSPAttentionHF"

_SPLITTERS = {
    PACKAGE: "DeepSpeed's sequence parallelism (sp_size)",
    "ring_flash_attn": "ring attention (ring_flash_attn)",
    "torch.distributed": "context parallelism (cp_size, torch's context_parallel)",
}
"""Packages that replace the attention function when rows are split, with their names for users."""


def row_part(model: Model, call: Call) -> RowPart | None:
    """The part of every row that this process holds under Ulysses; None if rows are whole.

    Nothing is read from a device. In a compiled graph the check runs once. The attention function is an argument of
    the check, so that replacing the function makes a new graph.

    Raises:
        PackingNotIsolated: another engine splits rows.
    """
    sdpa = torch.nn.functional.scaled_dot_product_attention
    implementation = getattr(model.config, "_attn_implementation", None)
    splitter = _splitter(sdpa, implementation)
    if splitter == _SPLITTERS[PACKAGE]:
        found = _ulysses_part(implementation, model.training)
        if found is not None:
            return RowPart(*found) if found else None
    if not splitter and not compiling() and _shards(call):
        splitter = "a sharding of the tokens along the row (DTensor)"
    if splitter:
        raise PackingNotIsolated(
            f"{splitter} is on: this process holds only a part of every row, so documents that are cut would be "
            "computed wrong. Train without it, or revert the patch and train padded."
        )
    return None


@constant
def _ulysses_part(implementation: object, training: bool) -> tuple[Any, ...] | None:
    """The fields of the :class:`RowPart` that Ulysses gives this process, none of them if rows are whole; or None."""
    attention = _ulysses(implementation)
    if attention is None:
        return None
    part = part_of(attention, training)
    return () if part is None else (part.number, part.of, part.group)


def _ulysses(implementation: object) -> Any:
    """The ``UlyssesSPAttentionHF`` that splits rows, or None.

    It may be registered for another implementation than this model's, which then gets parts of rows too.
    """
    held = (attention_of(function) for function in (registered(implementation), *any_registered()))
    return next((one for one in held if one is not None), None)


@contextlib.contextmanager
def evaluation_split_too(model: Model) -> Iterator[None]:
    """Split rows in evaluation as in training inside this context."""
    attention = _ulysses(getattr(model.config, "_attn_implementation", None))
    left_out = getattr(attention, "disable_in_eval", None)
    if left_out:
        attention.disable_in_eval = False
    try:
        yield
    finally:
        if left_out:
            attention.disable_in_eval = left_out


@constant
def _splitter(sdpa: Function, implementation: object) -> str:
    utilities = sys.modules.get(
        "transformers.modeling_flash_attention_utils"
    )  # where ring_flash_attn puts its function
    for function in (sdpa, registered(implementation), *any_registered(), getattr(utilities, FLASH, None)):
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


def attention_of(function: Function | None) -> Any:
    """The ``UlyssesSPAttentionHF`` behind an attention function, or None."""
    held = inspecting.enclosed(function)
    return next((value for value in held if any(cls.__name__ == _CLASS for cls in type(value).__mro__)), None)


def part_of(attention: Any, training: bool) -> RowPart | None:
    """The part that this process holds; None if rows are whole.

    Args:
        attention: the ``UlyssesSPAttentionHF``.
        training: whether the model is in training mode. With ``disable_in_eval``, which accelerate sets, rows are
            whole in evaluation.
    """
    group = attention.process_group
    processes = dist.get_world_size(group)
    if processes == 1 or (getattr(attention, "disable_in_eval", False) and not training):
        return None
    return RowPart(dist.get_rank(group), processes, collectives.named(group))
