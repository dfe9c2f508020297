"""Find where documents start in the arguments of a forward, and make the :class:`PackedMask` of a packed batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .._torch import HAS_OPERATORS, compiling, recording, transforming
from .._types import Call
from ..documents.boundaries import Boundaries
from ..documents.find import counts_anew, find_boundaries, in_graph, is_plain
from ..documents.given_boundaries import from_cu_seqlens
from ..documents.names import LENGTHS, PARENTS
from ..documents.tensors import largest
from ..errors import BadParents, PackedWithCache, PackedWithDenseMask, PackingNotIsolated
from . import caches
from .calls import Batch, has_pictures, read_batch, refuse_recording
from .packed_mask import PackedMask
from .rope import LengthScaled
from .step import Patched

if TYPE_CHECKING:
    from .split.row_part import RowPart


def packed_mask_of(
    call: Call,
    patch: Patched,
    made_inside: bool = False,  # an outer model made the ids, so that only certain restarts start a document
    training: bool = False,  # ids that jump behind padding are then an error; otherwise they are upstream's filler
    part: RowPart | None = None,
    # The model gives the same outputs for one document if its row is computed packed. In a graph such a row is always
    # packed, because the graph cannot choose by what ids say.
    may_be_packed: bool = False,
    always: bool = False,  # rows with one document each are packed, too
) -> PackedMask | None:
    """Return the :class:`PackedMask` of a packed batch, or None for a dense batch."""
    # A batch with one document in each row is packed only if `cu_seq_lens_*` are given, if rows are split over
    # processes, or `always`. A packed batch without `position_ids` gets them in `call`.
    facts, first = patch.facts, patch.facts.first_position
    if part is None:
        batch = rows = read_batch(call, facts.has_mixers)
    else:
        batch, rows, part = part.of_whole_rows(call, facts.has_mixers)
    says = batch is not None and (batch.lengths or batch.position_ids is not None or batch.mask is not None)
    captured = compiling()  # not as the step knows it: behind a graph break, dynamo may trace this function alone
    if says and not (made_inside or captured) and recording():
        refuse_recording("make_fx (or aot_function, or what is made of them)")
    found: Boundaries | None = None
    if batch is None or rows is None:
        if not made_inside:
            _refuse_rows_beside_a_causal_mask(call, first)
    elif "cu_seq_lens_q" in batch.lengths:
        found = _stated(rows, facts.both_ways)
        if part is not None and batch.position_ids is not None:  # ids of the part, which must not contradict them
            cu = part.clipped(found, batch.shape)
            from_cu_seqlens(cu, found.max_seqlen, batch.shape, position_ids=batch.position_ids)
    elif captured and may_be_packed and part is None and not made_inside and _stays_in_the_graph(batch, call, training):
        assert batch.position_ids is not None
        found = in_graph(batch.position_ids.reshape(batch.shape), first)
    else:
        # With `every`, a batch with one document in each row has boundaries, too: if rows are split over processes,
        # because upstream's code knows only a part of each row, or if the model takes no position ids.
        every, seq_idx, mask = always or part is not None, rows.lengths.get("seq_idx"), rows.mask
        tells = rows.position_ids is not None or seq_idx is not None or (mask is not None and mask.dtype != torch.bool)
        if tells and (rows.shape[1] != 1 or every):
            found = find_boundaries(
                rows.shape,
                rows.device,
                position_ids=rows.position_ids,
                attention_mask=mask,
                seq_idx=seq_idx,
                only_certain=made_inside,
                always=every,
                first_position=first,
                training=training,
            )
    packed: PackedMask | None = None
    if batch is not None and rows is not None and found is not None:
        _refuse_what_cannot_be_packed(call, batch, training, captured)
        if batch.mask is not None:  # router losses weigh a token by its number in the mask
            call["attention_mask"] = (batch.mask != 0).to(batch.mask.dtype)
        ids = batch.position_ids
        if ids is None or has_pictures(call):
            ids = call["position_ids"] = _position_ids(call, patch, batch, rows.shape, found, part)
        longest = rows.shape[1] if found.positions is None else found.positions  # the row's length is enough
        if facts.rope is not None:
            longest = _within_rope(found, facts.rope, rows.shape, ids, part is not None)
        packed = PackedMask(found, patch.picks, batch.shape, longest, ids, facts, real=batch.mask, part=part)
    elif part is not None:
        part.refuse_unsaid(call)
    return packed


def _refuse_rows_beside_a_causal_mask(call: Call, first: int) -> None:
    # `generate()` with a static cache makes such masks of any row, one or one for each kind of layer, and passes the
    # position ids on. Masks that keep documents apart say what upstream needs.
    ids, given = call.get("position_ids"), call.get("attention_mask")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.shape[1] == 1 or compiling() or not caches.held(call):
        return
    for mask in given.values() if isinstance(given, dict) else [given]:
        if _documents_meet(ids, mask, first):
            raise PackedWithCache(
                "a packed batch came with a cache and a mask for every query that lets documents see each other, as "
                "generate() makes it. What a cache holds belongs to no one document of the row. Generate from "
                "documents one by one."
            )


def _documents_meet(ids: torch.Tensor, mask: Any, first: int) -> bool:
    """Whether a token at which ids restart sees an earlier one. Padding, whose ids are fillers, does not count."""
    # `ids` are [batch or 1, length]. A mask [batch, 1, length, keys] is True or 0 where a query sees a key. In
    # [batch, keys] real keys are not 0, and the last keys are this call's. None: every query sees all up to itself.
    # Another mask (a BlockMask) is not looked into: ids that have counted up before they restart are then enough.
    length, counts_on = ids.shape[1], ~counts_anew(ids[:, 1:], ids[:, :-1])
    # Whoever counts from 0 in any model, as `generate()` does, passes `first` as he counts on.
    starts = ((ids[:, 1:] == first) | (ids[:, 1:] == 0)) & ~counts_on
    if isinstance(mask, torch.Tensor) and mask.dim() == 4 and mask.shape[2] == length and mask.shape[3] >= length:
        sees = (mask if mask.dtype == torch.bool else mask == 0)[:, 0]
        # padding sees every key, or not itself; a picture's tokens see later ones, too, and are seen
        real = (sees.diagonal(dim1=1, dim2=2) & ~sees.triu(1).any(-1)) | sees[:, -1, :length]
        starts = starts & (sees[..., :length].tril(-1).any(-1) & real)[:, 1:]
    elif isinstance(mask, torch.Tensor):
        if mask.dim() != 2 or mask.shape[1] < length:
            return False
        real = mask[:, -length:] != 0
        starts = starts & real[:, 1:] & (real[:, :-1].cumsum(1) > 0)
    elif mask is not None:
        starts = starts[:, 1:] & (counts_on[:, :-1].cumsum(1) > 0)
    return bool(starts.any())


def _within_rope(found: Boundaries, rope: LengthScaled, shape: tuple[int, int], ids: torch.Tensor, split: bool) -> int:
    # the largest position id + 1, which a rope depends on; `split` says whether rows are split over processes
    longest = found.positions
    if longest is None or ids.dim() > 2:
        longest = largest(ids) + 1  # ids may jump, so that a document's length does not say how far they reach
        longest = max(longest, largest(found.positions_of(shape)) + 1) if split else longest
    rope.check(longest, found.tree, split)
    return longest


def _stated(batch: Batch, both_ways: bool) -> Boundaries:
    found = from_cu_seqlens(
        batch.lengths["cu_seq_lens_q"],
        batch.lengths.get("max_length_q"),
        batch.shape,
        cu_seqlens_k=batch.lengths.get("cu_seq_lens_k"),
        position_ids=batch.position_ids,
        attention_mask=batch.mask,
        parents=batch.lengths.get(PARENTS),
    )
    if found.parents is not None and both_ways:
        raise BadParents(
            "segment_parents came to a model whose tokens see later tokens too: a prompt would see what continues it. "
            "Give this model every sequence as a document of its own."
        )
    if found.cu_seqlens.device != batch.device:  # rows that an engine splits: their lengths were read
        found = found.to(batch.device)
    return found.padding_apart(batch.mask) if batch.mask is not None and both_ways else found


def _stays_in_the_graph(batch: Batch, call: Call, training: bool) -> bool:
    # A row that may be one document must be computed packed without a loss. Outside training it may need the cache,
    # which packed rows have none of.
    if not HAS_OPERATORS or batch.shape[0] != 1 or batch.shape[1] == 1:
        return False
    asks = call.get("attention_mask") is not None or batch.cached or call.get("output_attentions")
    keeps_cache = not training and call.get("use_cache") is not False
    return not (asks or keeps_cache) and is_plain(batch.position_ids, None, batch.lengths.get("seq_idx"))


def _position_ids(
    call: Call, patch: Patched, batch: Batch, shape: tuple[int, int], found: Boundaries, part: RowPart | None
) -> torch.Tensor:
    """The position ids of a packed batch: those on several axes for its pictures, those that it has, or a count."""
    ids = batch.position_ids
    if has_pictures(call):
        from . import axes  # which few models need

        for name in LENGTHS:  # 5.10 to 5.16 pass them on to the vision tower, which has its own
            call.pop(name, None)
        on_axes = axes.of_pictures(patch.model, call, found, batch.mask)
        ids = ids if on_axes is None else on_axes
    if ids is not None:
        return ids
    counted, first = found.positions_of(shape).to(batch.device), patch.facts.first_position
    tokens: torch.Tensor | None = call.get("input_ids")
    if part is not None:
        return part.own(counted) + first
    if tokens is None or not first:
        return counted + first
    # RoBERTa and its kin count from `input_ids`: the padding token, one below `first_position`, has the id of its own
    # number. A real token may be one. Those behind it then count on without it.
    real = (tokens != first - 1).flatten().long()
    before = real.cumsum(0) - real
    starts = torch.arange(len(real), device=real.device) - counted.flatten()
    return (first - 1 + (before - before[starts] + 1) * real).view(counted.shape)


def _refuse_what_cannot_be_packed(call: Call, batch: Batch, training: bool, captured: bool) -> None:
    given = call.get("attention_mask")
    if given is not None and batch.mask is None:
        found = f"{list(given.shape)}" if isinstance(given, torch.Tensor) else type(given).__name__
        raise PackedWithDenseMask(
            f"a packed batch came with an attention_mask {found}: expected none, or [batch, length] with zeros for "
            "padding. Leave it out: position_ids already say where documents start."
        )
    if batch.cached:
        raise PackedWithCache(
            f"a packed batch came with {next(iter(caches.held(call)))}. What a cache holds belongs to no one document "
            "of the row. Leave the cache out (use_cache=False), or pass documents one by one."
        )
    if call.get("use_cache") and not training:  # generate() takes a row whose cache is missing for one token alone
        raise PackedWithCache(
            "a packed batch came with use_cache=True, and what a cache holds belongs to no one document of the row. "
            "Leave it out, or generate from documents one by one."
        )
    if call.get("output_attentions"):
        raise PackingNotIsolated(
            "output_attentions=True was asked of a packed batch: flash attention makes no weights to return. "
            "Leave it out, or pass documents one by one."
        )
    if not captured and transforming():
        raise PackingNotIsolated(
            "a packed batch came inside a transform of torch.func (vmap, grad, or what aot_function uses), which its "
            "kernels do not take part in. Call loss.backward(), pass documents one by one, or take the patch off: "
            "fa2patch.revert(model)."
        )
