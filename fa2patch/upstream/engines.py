"""Which engine splits rows, and how: DeepSpeed's Ulysses, torch's ``context_parallel``, ``ring_flash_attn``."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .._torch import compiling, constant
from .._types import Call, Function, Model
from ..errors import PackingNotIsolated
from . import inspecting
from .transformers_names import ATTENTION_FUNCTIONS, CALLS_FLASH, FLASH, MODELING, dictionary_in

if TYPE_CHECKING:
    from .split.row_part import RowPart

# the modules in which torch defines its context parallelism, the newest first
SPLITS_ROWS = (
    "torch.distributed.tensor.experimental._context_parallel._attention",
    "torch.distributed.tensor.experimental._attention",
)

_PACKAGE = "deepspeed.runtime.sequence_parallel"
_RING = "ring_flash_attn"
_TORCH = "torch.distributed"

# packages that replace the attention function when rows are split, with their names for users
_SPLITTERS = {
    _PACKAGE: "DeepSpeed's sequence parallelism (sp_size)",
    _RING: "ring attention (ring_flash_attn)",
    _TORCH: "context parallelism (cp_size, torch's context_parallel)",
}


def row_part(model: Model, call: Call) -> RowPart | None:
    # A part looks like a whole row. With Ulysses it may end inside a document, with context parallelism it holds a
    # row's head and tail, with ids such as 0, 1, 6, 7. Nothing is read from a device. In a compiled graph the check
    # runs once: where another function stands in the place of sdpa, forwards are not compiled.
    splitter = _splitter()
    fields = _fields(splitter, model.training) if splitter else ()
    for name, along in _ALONG_THE_ROW:
        if hasattr(call.get(name), "placements") and _is_sharded(call[name], along):
            splitter, fields = "a sharding of the tokens along the row (DTensor)", None
    if splitter and fields is None:
        raise PackingNotIsolated(
            f"{splitter} is on: this process holds only a part of every row, so documents that are cut would be "
            "computed wrong. Train without it, or revert the patch and train padded."
        )
    part = None
    if fields:
        from .split.row_part import RowPart  # few processes have a part

        number, of, group, arranges = fields
        part = RowPart(number, of, None, group, splitter, arranges, sends_heads=arranges is None)
    return part


def _fields(splitter: str, training: bool) -> tuple[Any, ...] | None:
    # those of _part_in; None if it is not known how the engine splits rows
    if splitter == _SPLITTERS[_PACKAGE]:
        return _ulysses_part(training)
    if splitter == _SPLITTERS[_RING]:
        return _ring_part()
    return _context_part(torch.nn.functional.scaled_dot_product_attention) if splitter == _SPLITTERS[_TORCH] else None


_ALONG_THE_ROW = (("input_ids", 1), ("inputs_embeds", 1), ("position_ids", -1))


def _is_sharded(tokens: Any, along: int) -> bool:
    # whether a DTensor's tokens lie in several processes
    shards = [placement.is_shard(along % tokens.dim()) for placement in tokens.placements]
    return not compiling() and any(tokens.device_mesh.size(axis) > 1 for axis, is_one in enumerate(shards) if is_one)


@contextlib.contextmanager
def evaluation_split_too() -> Iterator[None]:
    attention = _ulysses()
    left_out = getattr(attention, "disable_in_eval", None)
    if left_out:
        attention.disable_in_eval = False
    try:
        yield
    finally:
        if left_out:
            attention.disable_in_eval = left_out


@constant
def _ulysses_part(training: bool) -> tuple[Any, ...] | None:
    # Where this process's part is, empty if rows are whole; None without Ulysses. With `disable_in_eval`, which
    # accelerate sets, rows are whole in evaluation.
    attention = _ulysses()
    if attention is None:
        return None
    if getattr(attention, "disable_in_eval", False) and not training:
        return ()
    return _part_in(attention.process_group, None)


def _part_in(group: Any, arranges: Any) -> tuple[Any, ...]:
    if dist.get_world_size(group) == 1:
        return ()
    from .split.collectives import groups

    groups[group.group_name] = group
    return dist.get_rank(group), dist.get_world_size(group), group.group_name, arranges


def _context_part(sdpa: Function) -> tuple[Any, ...] | None:
    # Inside torch's `context_parallel` a closure with the mesh stands in the place of sdpa. Its options say whether
    # this row was split in head and tail: they are set anew for each row, by its length.
    meshes = [value for value in inspecting.enclosed(sdpa).values() if hasattr(value, "get_group")]
    options = getattr(sdpa, "__globals__", {}).get("_cp_options")
    if len(meshes) != 1 or options is None:
        return None
    from ..documents.parts import consecutive, head_and_tail
    from .split import balance

    order = balance.order_of(options)
    arranges: Any = head_and_tail if options.enable_load_balance else consecutive
    if order is not None:
        arranges = functools.partial(balance.arranged, order)
    return _part_in(meshes[0].get_group(), arranges)


@constant
def _ring_part() -> tuple[Any, ...] | None:
    # The function that substitute_hf_flash_attn puts in the place of Transformers' holds the process group in the
    # functions that it calls. Its rows are cut into consecutive parts. It is switched off for rows that are whole.
    for name in FLASH:
        function = getattr(sys.modules.get(name), CALLS_FLASH, None)
        groups = [*_groups_in(function, 3)]
        if groups and getattr(function, "__globals__", {}).get("RING_ATTN_SWITCH", True) is False:
            return ()
        if groups:
            from ..documents.parts import consecutive

            return _part_in(groups[0], consecutive)
    return None


def _groups_in(function: object, depth: int) -> Iterator[Any]:
    for value in inspecting.enclosed(function).values() if depth else ():
        if isinstance(value, dist.ProcessGroup):
            yield value
        yield from _groups_in(value, depth - 1)


def _ulysses() -> Any:
    # it may be registered for another model's implementation, and this one then gets parts of rows too
    for function in _registered():
        for value in inspecting.enclosed(function).values():
            if any(cls.__name__ == "UlyssesSPAttentionHF" for cls in type(value).__mro__):
                return value
    return None


def _registered() -> list[Function]:
    table = dictionary_in(MODELING, ATTENTION_FUNCTIONS)
    return list(map(table.__getitem__, table))


@constant
def _splitter() -> str:
    functions: list[Any] = [torch.nn.functional.scaled_dot_product_attention]
    for name in FLASH:  # where ring_flash_attn puts its own
        functions.append(getattr(sys.modules.get(name), CALLS_FLASH, None))
    if _PACKAGE in sys.modules or _RING in sys.modules:  # torch's context parallelism registers nothing
        functions += _registered()
    splitters = []
    for function in functions:
        module = f"{getattr(function, '__module__', '')}."
        for package, name in _SPLITTERS.items():
            if module.startswith(f"{package}."):
                splitters.append(name)
    # DTensor has a handler for flash attention while context parallelism is on
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    handlers = getattr(getattr(dtensor, "_op_dispatcher", None), "_custom_op_handlers", {})
    on = torch.ops.aten._scaled_dot_product_flash_attention.default in [*handlers]  # to hash an operator is a call
    of_torch = _SPLITTERS[_TORCH] if on else ""
    return splitters[0] if splitters else of_torch
