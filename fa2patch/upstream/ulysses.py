"""Rows that are split over processes: Ulysses (DeepSpeed's sequence parallelism) is taken, other engines are refused.

The engine is DeepSpeed's, with its loader, process groups, optimizer and losses, but its attention module is not
called: it gathers ids in every layer and hands no boundaries to a kernel. Our own exchange shares out sinks and ALiBi
slopes with the heads, sends queries, keys and values at once, also MLA's, whose values have another width, and serves
seams that do not go through the dictionary of attention functions.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from .._torch import HAS_OPERATORS, compiling, constant, operator_later, uncompiled
from .._types import Call, Function, Model
from ..documents.boundaries import Part
from ..documents.find import axes_of, whole_numbers
from ..documents.names import PARENTS
from ..errors import PackingNotIsolated
from ..kernels import Options
from . import inspecting
from .calls import Batch, has_pictures, passed
from .transformers_names import ATTENTION_FUNCTIONS, CALLS_FLASH, FLASH, MODELING, dictionary_in

groups: dict[str, Any] = {}  # process groups by their group_name, because operators take no objects


# What processes send each other, as operators that keep a compiled model's graph whole


def _exchanged(pieces: torch.Tensor, group: str) -> torch.Tensor:
    pieces = pieces.contiguous()
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces, group=groups[group])
    return received


@uncompiled
def _differentiable(pieces: torch.Tensor, group: str) -> torch.Tensor:
    from torch.distributed.nn.functional import all_to_all_single  # loads much, for torch before 2.4

    pieces = pieces.contiguous()
    received = torch.empty_like(pieces)
    exchanged: torch.Tensor = all_to_all_single(received, pieces, group=groups[group])  # type: ignore[no-untyped-call]
    return exchanged


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
    exchanged = torch.ops.fa2patch.exchange.default if HAS_OPERATORS else _differentiable
    received: torch.Tensor = exchanged(pieces, group)
    return received


def whole_rows(values: torch.Tensor, group: str, processes: int) -> torch.Tensor:
    # Parts are [..., length]. There is no gradient.
    gather = torch.ops.fa2patch.whole_rows.default if HAS_OPERATORS else _whole_rows
    whole: torch.Tensor = gather(values, group, processes)
    return whole


@dataclass(frozen=True)
class RowPart(Part):
    """The part of every row that this process holds, and what it takes to compute attention with it."""

    group: str = ""  # the name of the process group that shares the rows

    def gathered(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        # The values are integers [batch, length], of which every process of the group has a part.
        own = torch.stack([value.to(torch.int64) for value in values])
        return list(whole_rows(own, self.group, self.of).unbind())

    def all_tokens(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Options]:
        """Give up heads for tokens."""
        # [batch, length of the part, heads, dim] becomes [batch, length of the row, heads / processes, dim], with at
        # least one head. Key heads fewer than processes are sent to several.
        heads, keys = q.shape[2], k.shape[2]
        if heads % self.of or (keys % self.of and self.of % keys):
            raise PackingNotIsolated(
                f"sequence parallelism over {self.of} processes shares out heads: expected query heads that "
                f"{self.of} divides, and key heads that {self.of} divides or that divide {self.of}; found {heads} and "
                f"{keys}. Use fewer processes for a row."
            )
        batch, length = q.shape[:2]
        widths, pieces = [], []
        for state in (q, k, v):
            heads, dim = state.shape[2:]
            if heads < self.of:
                state = state.repeat_interleave(self.of // heads, dim=2)
            widths.append((max(heads // self.of, 1), dim))
            pieces.append(state.reshape(batch, length, self.of, -1))
        sent = torch.cat(pieces, dim=-1).permute(2, 0, 1, 3)  # [processes, batch, length, width]
        received = exchange(sent, self.group).permute(1, 0, 2, 3).reshape(batch, self.of * length, -1)
        split = torch.split(received, [heads * dim for heads, dim in widths], dim=-1)
        q, k, v = (x.reshape(*x.shape[:2], *width) for x, width in zip(split, widths))
        return q, k, v, options.with_heads(lambda by_head: self.own(by_head, 0))

    def own_tokens(self, output: torch.Tensor) -> torch.Tensor:
        # This undoes `all_tokens`.
        batch, length, heads, dim = output.shape
        pieces = output.reshape(batch, self.of, length // self.of, heads * dim).transpose(0, 1)
        received = exchange(pieces, self.group)  # [processes, batch, length of the part, width]
        return received.permute(1, 2, 0, 3).reshape(batch, length // self.of, self.of * heads, dim)


def of_whole_rows(batch: Batch | None, part: RowPart, call: Call) -> Batch:
    # Nothing is gathered if the collator's lengths are given, which must be those of the whole rows, and there is
    # neither a mask nor a tree.
    if batch is None or (batch.position_ids is None and not {"cu_seq_lens_q", "seq_idx"} & batch.lengths.keys()):
        refuse_unsaid(call)
    if has_pictures(call):
        raise PackingNotIsolated(
            "sequence parallelism (sp_size) splits rows over processes, and this batch has pictures, which are merged "
            "into whole rows. Train text, or train without sequence parallelism."
        )
    lengths = dict(batch.lengths)
    given = [] if batch.position_ids is None else [axis.expand(batch.shape) for axis in axes_of(batch.position_ids)]
    if batch.mask is None and PARENTS not in lengths and "cu_seq_lens_q" in lengths:
        return batch._replace(shape=part.rows(batch.shape), position_ids=None)
    more = [] if batch.mask is None else [whole_numbers(batch.mask)]
    more += [lengths["seq_idx"].expand(batch.shape)] if "seq_idx" in lengths else []
    whole = part.gathered([*given, *more])
    if "seq_idx" in lengths:
        lengths["seq_idx"] = whole.pop()
    mask = None if batch.mask is None else whole.pop()
    ids = None if not whole else whole[0] if len(whole) == 1 else torch.stack(whole)
    return batch._replace(shape=part.rows(batch.shape), position_ids=ids, mask=mask, lengths=lengths)


def refuse_unsaid(call: Call) -> NoReturn:
    raise PackingNotIsolated(
        "sequence parallelism (sp_size) splits rows over processes: expected position_ids for this part of every row, "
        "or seq_idx, or cu_seq_lens_q of the whole rows, no cache, and no mask but one of zeros, ones and document "
        f"numbers; found {', '.join(sorted(passed(call, call)))}. Add position_ids before rows are split."
    )


# Which engine splits rows

_PACKAGE = "deepspeed.runtime.sequence_parallel"
_RING = "ring_flash_attn"

# packages that replace the attention function when rows are split, with their names for users
_SPLITTERS = {
    _PACKAGE: "DeepSpeed's sequence parallelism (sp_size)",
    _RING: "ring attention (ring_flash_attn)",
    "torch.distributed": "context parallelism (cp_size, torch's context_parallel)",
}


def row_part(model: Model, call: Call) -> RowPart | None:
    # A part looks like a whole row. With Ulysses it may end inside a document, with context parallelism it holds a
    # row's head and tail, with ids such as 0, 1, 6, 7. Nothing is read from a device. In a compiled graph the check
    # runs once. The attention function is its argument, so that replacing the function makes a new graph.
    splitter = _splitter(torch.nn.functional.scaled_dot_product_attention)
    fields = _ulysses_part(model.training) if splitter == _SPLITTERS[_PACKAGE] else None
    for name, along in (("input_ids", 1), ("inputs_embeds", 1), ("position_ids", -1)):
        tokens: Any = call.get(name)
        for axis, placement in enumerate(getattr(tokens, "placements", ())):
            if placement.is_shard(along % tokens.dim()) and tokens.device_mesh.size(axis) > 1 and not compiling():
                splitter = splitter or "a sharding of the tokens along the row (DTensor)"
    if splitter and fields is None:
        raise PackingNotIsolated(
            f"{splitter} is on: this process holds only a part of every row, so documents that are cut would be "
            "computed wrong. Train without it, or revert the patch and train padded."
        )
    return RowPart(*fields) if fields else None


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
    # The fields of a RowPart, none of them if rows are whole; None without Ulysses. With `disable_in_eval`, which
    # accelerate sets, rows are whole in evaluation.
    attention = _ulysses()
    if attention is None:
        return None
    group = attention.process_group
    processes = dist.get_world_size(group)
    if processes == 1 or (getattr(attention, "disable_in_eval", False) and not training):
        return ()
    groups[group.group_name] = group
    return dist.get_rank(group), processes, group.group_name


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
def _splitter(sdpa: Function) -> str:
    functions: list[Any] = [sdpa]
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
    of_torch = _SPLITTERS["torch.distributed"] if on else ""
    return splitters[0] if splitters else of_torch
