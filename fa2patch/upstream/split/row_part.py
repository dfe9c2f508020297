"""The part of every row that this process holds, and the boundaries of the whole rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from ..._types import Call
from ...documents import tensors
from ...documents.find import axes_of, whole_numbers
from ...documents.names import PARENTS
from ...documents.parts import Order, Part
from ...errors import Fa2PatchError, PackingNotIsolated
from ..calls import Batch, batch_shape, has_pictures, passed, read_batch
from .collectives import whole_rows


@dataclass(frozen=True)
class RowPart(Part):
    """The part of every row that this process holds."""

    group: str = ""  # the name of the process group that shares the rows
    engine: str = ""  # what users call it, and its option
    # Makes the order of a row of so many tokens in so many parts. None: parts are consecutive and of one length.
    arranges: Callable[[int, int], Order] | None = None
    sends_heads: bool = True  # whether attention gives up heads for tokens, if both that and needed keys are possible

    def of_rows(self, length: int) -> RowPart:
        return self if self.arranges is None else replace(self, order=self.arranges(length, self.of))

    # Its attention

    def stays_in_a_graph(self, heads: int, keys: int) -> bool:
        return self.order is None and not self.why_no_heads(heads, keys)

    def why_no_heads(self, heads: int, keys: int) -> str:
        if heads % self.of or (keys % self.of and self.of % keys):
            return (
                f"heads are shared out if {self.of} divides the query heads, and divides the key heads or is divided "
                f"by them, found {heads} and {keys}"
            )
        sizes = set() if self.order is None else {*self.order.sizes}
        return "" if len(sizes) < 2 else f"heads are exchanged for parts of one length, found {sorted(sizes)}"

    # Its rows

    def of_whole_rows(self, call: Call, has_mixers: bool) -> tuple[Batch, Batch, RowPart]:
        """What this part says of documents, what the whole rows say, and the part of rows of their length."""
        # Nothing is gathered if the collator's lengths are given, which must be those of the whole rows, and there is
        # neither a mask nor a tree.
        part, batch, refused = self, None, None
        try:
            batch = read_batch(call, has_mixers)
        except Fa2PatchError as error:
            if self.arranges is None:
                raise
            refused = error
        if batch is not None and batch.position_ids is None and not _STATED & batch.lengths.keys():
            batch = None
        if self.arranges is not None:
            batch = batch if batch is None else batch._replace(lengths=_on_the_host(batch.lengths))
            part = self._arranged(batch, call, refused)
        if batch is None:
            self.refuse_unsaid(call)
        if has_pictures(call):
            raise PackingNotIsolated(
                f"{self.engine} splits rows over processes, and this batch has pictures, which are merged into whole "
                "rows. Train text, or train without it."
            )
        return batch, part._gathered_batch(batch), part

    def _gathered_batch(self, batch: Batch) -> Batch:
        lengths, shape = dict(batch.lengths), self.rows(batch.shape)
        if batch.mask is None and PARENTS not in lengths and "cu_seq_lens_q" in lengths:
            return batch._replace(shape=shape, position_ids=None)
        if lengths.get("seq_idx") is not None and lengths["seq_idx"].shape[-1] == shape[1]:
            batch = batch._replace(lengths={})  # Trainer's context parallelism leaves it whole
        whole = self.gathered([numbers.expand(batch.shape) for numbers in _numbers(batch)])
        if "seq_idx" in batch.lengths:
            lengths["seq_idx"] = whole.pop()
        mask = None if batch.mask is None else whole.pop()
        ids = None if not whole else whole[0] if len(whole) == 1 else torch.stack(whole)
        return batch._replace(shape=shape, position_ids=ids, mask=mask, lengths=lengths)

    def gathered(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        # The values are integers [batch, length], of which every process of the group has a part.
        own = torch.stack([value.to(torch.int64) for value in values])
        return list(self.joined(own).unbind())

    def joined(self, own: torch.Tensor) -> torch.Tensor:
        # [..., length of the part] becomes [..., length of the row]. There is no gradient.
        order = self.order
        if order is None:
            return whole_rows(own, self.group, self.of)
        longest = max(order.sizes)  # gloo ends the process where ranks gather different sizes
        found = whole_rows(torch.nn.functional.pad(own, (0, longest - own.shape[-1])), self.group, self.of)
        if min(order.sizes) < longest:
            pieces = zip(torch.split(found, longest, -1), order.sizes)
            found = torch.cat([piece[..., :size] for piece, size in pieces], -1)
        return found.index_select(-1, order.on(own.device, places=True))

    def _arranged(self, batch: Batch | None, call: Call, refused: Fa2PatchError | None) -> RowPart:
        # The length of the rows is known from lengths of the whole rows, or the processes tell each other theirs. What
        # else may differ between them is compared, too: else one would wait for the others without end.
        stated = call.get("cu_seq_lens_q") if batch is None else batch.lengths.get("cu_seq_lens_q")
        (rows, own), device = batch_shape(call)
        if isinstance(stated, torch.Tensor) and rows:
            part = self.of_rows(int(stated.flatten()[-1]) // rows)
            part.require_sizes([own])
        else:
            says = _REFUSED if refused else 0 if batch is None else 1 + len(_numbers(batch))
            every = whole_rows(torch.tensor([rows, own, says], device=device)[:, None], self.group, self.of)
            counts, lengths, kinds = tensors.read(every).tolist()
            part = self.of_rows(sum(lengths))
            if refused is None and 0 in kinds:
                self.refuse_unsaid(call)
            part.require_sizes(lengths)
            self._require_alike(counts, kinds, refused)
        if refused is not None:
            raise refused
        return part

    def require_sizes(self, found: list[int]) -> None:
        # `found` are the lengths of all parts, or that of this one
        assert self.order is not None
        sizes = [*self.order.sizes]
        if min(sizes) == 0 or found != (sizes if len(found) > 1 else [sizes[self.number]]):
            raise PackingNotIsolated(
                f"{self.engine} splits rows over {self.of} processes: expected parts of {', '.join(map(str, sizes))} "
                f"tokens, and none of 0; found {', '.join(map(str, found))}. Pad rows to a multiple of {2 * self.of} "
                f"tokens (pad_to_multiple_of={2 * self.of}), and let the engine split input_ids, position_ids and "
                "labels. cu_seq_lens_q are those of the whole rows."
            )

    def _require_alike(self, rows: list[int], kinds: list[int], refused: Fa2PatchError | None) -> None:
        if refused is None and (len({*rows}) > 1 or len({*kinds}) > 1):
            found = (
                "one that is refused there"
                if _REFUSED in kinds
                else (f"{rows} rows with {[kind - 1 for kind in kinds]} statements of where documents start")
            )
            raise PackingNotIsolated(
                f"{self.engine} splits rows over {self.of} processes: expected parts of the same rows, with the same "
                f"arguments, in all of them; found {found}. Give every process of the group the same batch, and let "
                "the engine split it."
            )

    def refuse_unsaid(self, call: Call) -> NoReturn:
        raise PackingNotIsolated(
            f"{self.engine} splits rows over processes: expected position_ids for this part of every row, "
            "or seq_idx, or cu_seq_lens_q of the whole rows, no cache, and no mask but one of zeros, ones and document "
            f"numbers; found {', '.join(sorted(passed(call, call)))}. Add position_ids before rows are split."
        )


_REFUSED = -1  # what a process says of its batch that is an error there

_STATED = {"cu_seq_lens_q", "seq_idx"}


def _numbers(batch: Batch) -> list[torch.Tensor]:
    # what says where documents start, one number for each token: ids, a mask, numbers of documents
    axes = [] if batch.position_ids is None else [*axes_of(batch.position_ids)]
    masks = [] if batch.mask is None else [whole_numbers(batch.mask)]
    return [*axes, *masks, *([batch.lengths["seq_idx"]] if "seq_idx" in batch.lengths else [])]


def _on_the_host(lengths: dict[str, Any]) -> dict[str, Any]:
    # Which keys are sent is computed from lengths there, so one read serves both.
    held = {name: lengths[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k") if name in lengths}
    read = {id(value): torch.from_numpy(tensors.read(value)) for value in held.values()}
    return {**lengths, **{name: read[id(value)] for name, value in held.items()}}
