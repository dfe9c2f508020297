"""What a batch says of whole rows, gathered from the processes that share them."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..._types import Call
from ...documents.names import PARENTS
from ...documents.recognition import whole_numbers
from ...documents.starts import axes_of
from ...errors import PackingNotIsolated
from ..calls import Batch, has_pictures, passed
from .row_part import RowPart


def of_whole_rows(batch: Batch | None, part: RowPart, call: Call) -> Batch:
    """What a batch says of the whole rows of which this process holds a part. It is gathered once.

    Nothing is gathered if the collator's lengths are given, which must be those of the whole rows, and there is neither
    a mask nor a tree.

    Raises:
        PackingNotIsolated: the call does not say where documents are in the whole rows.
    """
    if batch is None or (batch.position_ids is None and not {"cu_seq_lens_q", "seq_idx"} & batch.lengths.keys()):
        refuse_unsaid(call)
    assert batch is not None
    if has_pictures(call):
        raise PackingNotIsolated(
            "sequence parallelism (sp_size) splits rows over processes, and this batch has pictures, which are merged "
            "into whole rows. Train text, or train without sequence parallelism."
        )
    lengths = dict(batch.lengths)
    given = [] if batch.position_ids is None else [axis.expand(batch.shape) for axis in axes_of(batch.position_ids)]
    if batch.mask is None and PARENTS not in lengths and "cu_seq_lens_q" in lengths:
        return replace(batch, shape=part.rows(batch.shape), position_ids=None)
    more = [] if batch.mask is None else [whole_numbers(batch.mask)]
    more += [lengths["seq_idx"].expand(batch.shape)] if "seq_idx" in lengths else []
    whole = part.gathered([*given, *more])
    if "seq_idx" in lengths:
        lengths["seq_idx"] = whole.pop()
    mask = None if batch.mask is None else whole.pop()
    ids = None if not whole else whole[0] if len(whole) == 1 else torch.stack(whole)
    return replace(batch, shape=part.rows(batch.shape), position_ids=ids, mask=mask, lengths=lengths)


def refuse_unsaid(call: Call) -> None:
    """Raise :class:`PackingNotIsolated` for a call that does not say where documents are in the whole rows."""
    raise PackingNotIsolated(
        "sequence parallelism (sp_size) splits rows over processes: expected position_ids for this part of every row, "
        "or seq_idx, or cu_seq_lens_q of the whole rows, no cache, and no mask but one of zeros, ones and document "
        f"numbers; found {', '.join(sorted(passed(call, call)))}. Add position_ids before rows are split."
    )
