"""A model whose rows an engine splits over processes, called with whole rows in every process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from .._types import Call, Model
from ..documents.names import IGNORED_LABEL, stated
from ..documents.row_shape import RowShape
from ..upstream import engines
from ..upstream.split import collectives
from ..upstream.split.row_part import RowPart
from .inputs import PER_TOKEN


class WholeRows(torch.nn.Module):
    """Calls a model with this process's part of whole rows, and gathers its outputs."""

    def __init__(self, model: Model, part: RowPart, counts_labels: bool) -> None:
        super().__init__()
        self.model, self.part, self.counts_labels = model, part, counts_labels
        self.multiple = part.of if part.arranges is None else 2 * part.of  # a piece of the row's head and of its tail
        # [batch, length] of the rows that were computed last, without padding, and of this process's part, with it
        self.shape: tuple[int, ...] = ()
        self.own_shape: tuple[int, ...] = ()

    # Every process of the group must make the same calls. Rows are padded to a multiple of the processes by a document
    # of its own, whose outputs are cut off.
    def forward(self, **batch: Any) -> Any:
        ids = batch["input_ids"]
        length, more = ids.shape[1], -ids.shape[1] % self.multiple
        self.part, self.shape = self.part.of_rows(length + more), tuple(ids.shape)
        if batch.get("position_ids") is None and batch.get("cu_seq_lens_q") is None:
            batch["position_ids"] = torch.arange(length, device=ids.device).expand(ids.shape)
        if more:
            batch = _padded(batch, more, RowShape(pad_to_multiple_of=self.multiple))
        # Labels are shifted before rows are split, as by DeepSpeed's loader and by Trainer.
        if batch.get("labels") is not None:
            shifted = torch.nn.functional.pad(batch["labels"], (0, 1), value=IGNORED_LABEL)[:, 1:]
            batch.update(shift_labels=shifted, labels=shifted)
        batch.update({name: self.part.own(value).contiguous() for name, value in _of_tokens(batch).items()})
        labels, self.own_shape = batch.get("shift_labels"), tuple(batch["input_ids"].shape)
        output = self.model(**batch)
        named = {"logits": output.logits} if hasattr(output, "logits") else {"last_hidden_state": output[0]}
        found = {name: self.whole(value) for name, value in named.items()}
        loss = getattr(output, "loss", None)
        # The mean is over the labels that are passed. A patched model ignores some, so its labels are not counted.
        if loss is not None and labels is not None and self.counts_labels:
            count = (labels != IGNORED_LABEL).sum()
            sums = torch.stack([torch.where(count > 0, loss.detach() * count, 0.0), count.to(loss.dtype)])
            dist.all_reduce(sums, group=collectives.groups[self.part.group])
            found["loss"] = sums[0] / sums[1]
        return SimpleNamespace(**found)

    def own(self, values: torch.Tensor) -> torch.Tensor:
        # this process's part of the values [batch, length] of whole rows, with zeros for padding
        return self.part.own(torch.nn.functional.pad(values, (0, -values.shape[1] % self.multiple)))

    def whole(self, values: torch.Tensor) -> torch.Tensor:
        # the values [batch, length, ...] of all processes, without padding
        return self.gathered(values)[:, : self.shape[1]]

    def has_tokens(self, values: torch.Tensor) -> bool:
        # whether the values are [batch, length of the part, ...]
        return tuple(values.shape[:2]) == self.own_shape

    def gathered(self, values: torch.Tensor, dim: int = 1) -> torch.Tensor:
        # The gradient of the part's values is their own.
        return _Gather.apply(values, dim, self.part)  # type: ignore[no-untyped-call,no-any-return]

    def summed(self, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=collectives.groups[self.part.group])
        return gradient


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, dim: int, part: RowPart) -> torch.Tensor:
        ctx.dim, ctx.part = dim, part
        return part.joined(values.movedim(dim, -1)).movedim(-1, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return ctx.part.own(gradient, ctx.dim), None, None


def whole_call(call: Call, part: RowPart, shape: tuple[int, int]) -> Call:
    """The call of whole rows, of which ``call`` has this process's part."""
    made = dict(call)
    for name, value in call.items():
        if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[-1] == shape[1]:
            made[name] = part.joined(value.contiguous())
    shifted = made.pop("shift_labels", None)  # they are shifted again where the rows are split
    if shifted is not None:
        made["labels"] = torch.nn.functional.pad(shifted, (1, 0), value=IGNORED_LABEL)[:, :-1]
    return made


def _of_tokens(batch: Call) -> Call:
    tensors = {name: value for name, value in batch.items() if name in PER_TOKEN and isinstance(value, torch.Tensor)}
    return {name: value for name, value in tensors.items() if value.shape[-1] == batch["input_ids"].shape[1]}


def _padded(batch: Call, more: int, shape: RowShape) -> Call:
    # A document of ``more`` tokens is added to every row.
    rows, length = batch["input_ids"].shape
    longer = {name: shape.padded(name, value, value.dim() - 1) for name, value in _of_tokens(batch).items()}
    if "seq_idx" in longer:
        longer["seq_idx"][..., length:] = longer["seq_idx"][..., length - 1 : length] + 1
    if batch.get("cu_seq_lens_q") is None:
        return {**batch, **longer}
    cu = batch["cu_seq_lens_q"].flatten()
    new = torch.arange(1, rows + 1, device=cu.device, dtype=cu.dtype) * (length + more)
    ends = torch.cat([cu + (cu - 1).clamp(min=0) // length * more, new]).sort().values
    longest = max(more, int(batch.get("max_length_q") or ends.diff().max()))
    return {**batch, **longer, **stated(ends, longest)}


@contextlib.contextmanager
def whole(model: Model, inner: Model, patched: bool) -> Iterator[Any]:
    # The model itself is yielded if no engine splits rows in training. Inside, evaluation is split like training, also
    # if the engine was told to leave it out.
    with engines.evaluation_split_too():
        part = engines.row_part(inner, {})
        yield model if part is None else WholeRows(model, part, counts_labels=not patched)
