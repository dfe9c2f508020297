"""Make the :class:`PackedMask` of a packed batch from the arguments of a forward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from .._compile import compiling
from .._types import Call, Model
from ..documents.boundaries import Boundaries, largest
from ..documents.checks import check_cu_seqlens, check_position_ids
from ..documents.names import CACHES, LENGTHS, PARENTS, PICTURES, TOKENS
from ..documents.recognition import recognise, whole_numbers
from ..documents.starts import axes_of
from ..documents.stated import from_cu_seqlens
from ..errors import BadCuSeqlens, BadParents, PackedWithCache, PackedWithDenseMask, PackingNotIsolated
from . import rope
from .calls import batch_shape, passed
from .find_models import models
from .packed_mask import PackedMask
from .parts.row_part import RowPart
from .step import Patched
from .traits import directions, mixers, positions


def packed_mask(
    call: Call, patch: Patched, made_inside: bool = False, training: bool = False, part: RowPart | None = None
) -> PackedMask | None:
    """Return the :class:`PackedMask` of a packed batch, or None for a dense batch.

    A batch with one document in each row is packed only if ``cu_seq_lens_*`` are given, or if rows are split over
    processes. For a packed batch without ``position_ids``, ``call["position_ids"]`` is set.

    Args:
        call: the arguments of the forward by name.
        patch: the model's ``Patch``.
        made_inside: whether an outer model made the position ids. Only certain restarts then start a document.
        training: whether ids that jump behind padding are an error. Otherwise they are taken for upstream's filler.
        part: the part of every row that this process holds; None if rows are whole.

    Raises:
        PackedWithCache: the batch is packed and comes with a cache.
        PackedWithDenseMask: the batch is packed and its ``attention_mask`` is not ``[batch, length]``.
        PackingNotIsolated: the batch cannot be computed packed, for example while a CUDA graph is captured.
        BadBatch, BadPositionIds, BadCuSeqlens, BoundaryConflict: the arguments are malformed or contradict each other.
    """
    batch = _read(call, patch)
    rows = batch if part is None else _whole_rows(batch, part, call)
    if batch is None or rows is None:
        return None
    found: Boundaries | None
    if "cu_seq_lens_q" in batch.lengths:
        found = _stated(rows, patch)
        if part is not None and batch.position_ids is not None:
            cu = part.clipped(found.cu_seqlens, batch.shape)
            from_cu_seqlens(cu, found.max_seqlen, batch.shape, position_ids=batch.position_ids)
    else:
        first = patch.found[positions.NAME].first
        found = _recognised(rows, first, made_inside, training, split=part is not None)
    if found is None and part is not None:
        _refuse_unsaid(call)
    if found is None:
        return None
    _refuse_what_cannot_be_packed(call, batch.mask)
    if batch.position_ids is None:
        refuse_uncounted_pictures(patch.model, call)
        counted = found.positions_of(rows.shape).to(batch.device)
        call["position_ids"] = (counted if part is None else part.own(counted)) + patch.found[positions.NAME].first
    longest, scaled = found.positions, patch.found.get(rope.NAME)
    if scaled is not None:
        if longest is None:
            longest = largest(call["position_ids"] if part is None else found.positions_of(rows.shape)) + 1
        scaled.scaling.check(longest)
        scaled.scaling.check_tree(found.tree)
        if part is not None:
            scaled.scaling.check_part(longest)
    longest = rows.shape[1] if longest is None else longest
    return PackedMask(found, patch.picks, batch.shape, longest, call["position_ids"], patch.found, part=part)


@dataclass(eq=False)
class _Batch:
    """The arguments of a forward that may say where documents start.

    Attributes:
        shape: ``(batch, length)``.
        device: the device of the tokens.
        lengths: the collator's lengths.
        position_ids: the position ids, or None.
        mask: the part ``[batch, length]`` of a 2-D mask that describes this call's tokens, or None.
    """

    shape: tuple[int, int]
    device: torch.device
    lengths: dict[str, Any]
    position_ids: torch.Tensor | None
    mask: torch.Tensor | None


def _read(call: Call, patch: Patched) -> _Batch | None:
    """Check the arguments that may say where documents start; None for a call that is dense in any case."""
    tokens = next(iter(passed(call, TOKENS).values()), None)
    if tokens is None:
        return None
    position_ids, lengths = call.get("position_ids"), passed(call, LENGTHS)
    if position_ids is None and getattr(tokens, "ndim", 0) < 2 and not lengths:
        return None  # GPT-2 accepts one row of ids without a batch dimension
    shape, device = batch_shape(call)
    _check_lengths(lengths, device)
    given, cached = call.get("attention_mask"), bool(passed(call, CACHES))
    mask = _two_dimensional(given, shape, cached)
    says_outright = cached or (is_for_queries(given) and not (lengths or mixers.NAME in patch.found))
    if given is not None and mask is None and says_outright:
        return None  # a mask for every query, which generate() with a static cache also makes
    if position_ids is not None:
        check_position_ids(position_ids, shape)
    if mask is not None and "cu_seq_lens_q" in lengths and lengths["cu_seq_lens_q"].numel() == shape[0] + 1:
        del lengths["cu_seq_lens_q"]  # 4.54's generate(): one sequence in each padded row, as the mask says
    if (lengths or shape[1] > 1) and not compiling():
        _refuse_capture(device)
    return _Batch(shape, device, lengths, position_ids, mask)


def _whole_rows(batch: _Batch | None, part: RowPart, call: Call) -> _Batch:
    """What a batch says of the whole rows of which this process holds a part. It is gathered once.

    Nothing is gathered if the collator's lengths are given, which must be those of the whole rows, and there is neither
    a mask nor a tree.

    Raises:
        PackingNotIsolated: the call does not say where documents are in the whole rows.
    """
    if batch is None or (batch.position_ids is None and not {"cu_seq_lens_q", "seq_idx"} & batch.lengths.keys()):
        _refuse_unsaid(call)
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


def _refuse_unsaid(call: Call) -> None:
    raise PackingNotIsolated(
        "sequence parallelism (sp_size) splits rows over processes: expected position_ids for this part of every row, "
        "or seq_idx, or cu_seq_lens_q of the whole rows, no cache, and no mask but one of zeros, ones and document "
        f"numbers; found {', '.join(sorted(passed(call, call)))}. Add position_ids before rows are split."
    )


def _stated(batch: _Batch, patch: Patched) -> Boundaries:
    """The boundaries that the collator's lengths state."""
    found = from_cu_seqlens(
        batch.lengths["cu_seq_lens_q"],
        batch.lengths.get("max_length_q"),
        batch.shape,
        cu_seqlens_k=batch.lengths.get("cu_seq_lens_k"),
        position_ids=batch.position_ids,
        attention_mask=batch.mask,
        parents=batch.lengths.get(PARENTS),
    )
    if found.parents is not None and patch.found[directions.NAME].both:
        raise BadParents(
            "segment_parents came to a model whose tokens see later tokens too: a prompt would see what continues it. "
            "Give this model every sequence as a document of its own."
        )
    return found.padding_apart(batch.mask) if batch.mask is not None and patch.found[directions.NAME].both else found


def _recognised(
    batch: _Batch, first_position: int, made_inside: bool, training: bool, split: bool
) -> Boundaries | None:
    """The boundaries that position ids, ``seq_idx`` or a mask of document numbers give; None for a dense batch.

    If rows are split over processes, no batch is dense, because upstream's code knows only a part of each row.
    """
    seq_idx, mask = batch.lengths.get("seq_idx"), batch.mask
    says_nothing = batch.position_ids is None and seq_idx is None and (mask is None or mask.dtype == torch.bool)
    if batch.shape[1] == 1 or says_nothing:
        return None
    return recognise(
        batch.shape,
        batch.device,
        position_ids=batch.position_ids,
        attention_mask=mask,
        seq_idx=seq_idx,
        only_certain=made_inside,
        always=split,
        first_position=first_position,
        training=training,
    )


def _refuse_capture(device: torch.device) -> None:
    """Raise while a CUDA graph is captured, because it would replay this batch's max_seqlen and document count."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise PackingNotIsolated(
            "a CUDA graph is being captured: it would keep this batch's documents and compute others wrong. Capture "
            'nothing around a patched model; torch.compile(model, mode="reduce-overhead") looks at every batch.'
        )


def _check_lengths(lengths: dict[str, Any], device: torch.device) -> None:
    """Check the collator's lengths and move them to a device. Lengths of keys stand in for those of queries.

    Raises:
        BadCuSeqlens: they are not integers, or are on the meta device and the tokens are not.
    """
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if name in lengths:
            check_cu_seqlens(lengths[name])
            if lengths[name].device.type == "meta" and lengths[name].device != device:
                raise BadCuSeqlens("cu_seq_lens: expected a tensor with values, found one on the meta device.")
            lengths[name] = lengths[name].to(device)
    if "cu_seq_lens_k" in lengths and "cu_seq_lens_q" not in lengths:
        lengths["cu_seq_lens_q"] = lengths["cu_seq_lens_k"]
        lengths["max_length_q"] = lengths.get("max_length_k")
    if PARENTS in lengths and "cu_seq_lens_q" not in lengths:
        raise BadParents(
            "segment_parents came without cu_seq_lens_q: position_ids alone do not say where segments start. Pass "
            "both, as fa2patch.packing.share gives them."
        )


def _two_dimensional(mask: object, shape: tuple[int, int], cached: bool) -> torch.Tensor | None:
    """The mask of this call's tokens ``[batch, length]``, also from a mask ``[batch, cached + length]``; or None."""
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.shape[0] != shape[0]:
        return None
    if mask.shape[1] == shape[1]:
        return mask
    return mask[:, -shape[1] :] if cached and mask.shape[1] > shape[1] else None


def is_for_queries(mask: object) -> bool:
    """Whether a mask tells the keys of each query: a tensor of 3 or more dims, a ``BlockMask``, or a dict of such."""
    if isinstance(mask, dict):
        return bool(mask) and all(value is None or is_for_queries(value) for value in mask.values())
    return getattr(mask, "ndim", 0) > 2 or type(mask).__name__ == "BlockMask"


def has_pictures(call: Call) -> bool:
    """Whether pictures or videos are among a forward's arguments."""
    return bool(passed(call, PICTURES))


def refuse_uncounted_pictures(model: Model, call: Call) -> None:
    """Raise :class:`PackingNotIsolated` for pictures in a model that counts position ids on several axes.

    Position ids made by counting tokens would differ from those that the model makes for a document alone.
    """
    if has_pictures(call) and any(hasattr(inner, "get_rope_index") for inner in models(model)):
        raise PackingNotIsolated(
            "a packed batch came with pictures and without position_ids, which this model counts on three axes in each "
            "document. Pass them, as fa2patch.DataCollatorForMultimodalFlattening gives them."
        )


def _refuse_what_cannot_be_packed(call: Call, mask: torch.Tensor | None) -> None:
    given = call.get("attention_mask")
    if given is not None and mask is None:
        found = f"{list(given.shape)}" if isinstance(given, torch.Tensor) else type(given).__name__
        raise PackedWithDenseMask(
            f"a packed batch came with an attention_mask {found}: expected none, or [batch, length] with zeros for "
            "padding. Leave it out: position_ids already say where documents start."
        )
    held = passed(call, CACHES)
    if held:
        raise PackedWithCache(
            f"a packed batch came with {next(iter(held))}. What a cache holds belongs to no one document of the row. "
            "Leave the cache out (use_cache=False), or pass documents one by one."
        )
    if call.get("output_attentions"):
        raise PackingNotIsolated(
            "output_attentions=True was asked of a packed batch: flash attention makes no weights to return. "
            "Leave it out, or pass documents one by one."
        )
