"""A forward's arguments -> the :class:`PackedMask` of a packed batch, or None."""

from __future__ import annotations

from typing import Any

import torch

from .._compile import compiling
from ..boundaries import (
    Boundaries,
    check_cu_seqlens,
    check_position_ids,
    from_cu_seqlens,
    largest,
    positions_of,
    recognise,
)
from ..errors import BadCuSeqlens, PackedWithCache, PackedWithDenseMask, PackingNotIsolated
from .calls import LENGTHS, batch_shape
from .layers import models
from .packed_mask import PackedMask
from .rotary import tagged

_CARRIED = "_fa2patch_lengths"
_FOUND = "_fa2patch_mask"
_PICTURES = ("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw")


def packed_mask(call: dict[str, Any], patch: Any, made_inside: bool = False) -> PackedMask | None:
    """The mask of a packed batch, or None for every other batch; sees to ``call["position_ids"]`` too.

    A single document is packed only where lengths say so: else it is a dense row, computed as ever. So is a row whose
    ids a model around this one made itself (``made_inside``), where nothing in them restarts for certain.
    """
    tokens = call["input_ids"] if call.get("input_ids") is not None else call.get("inputs_embeds")
    position_ids = call.get("position_ids")
    if tokens is None or (position_ids is None and getattr(tokens, "ndim", 0) < 2 and not lengths_of(call)):
        return None  # GPT-2 takes one row of ids without a batch
    shape, device = batch_shape(call)
    found_before: PackedMask | None = getattr(position_ids, _FOUND, None)
    if found_before is not None and found_before.shape == shape:
        return found_before
    lengths = lengths_of(call)
    if not lengths and isinstance(position_ids, torch.Tensor):
        lengths = dict(getattr(position_ids, _CARRIED, {}))
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if isinstance(lengths.get(name), torch.Tensor):
            lengths[name] = lengths[name].to(device)
    given, cache = call.get("attention_mask"), call.get("past_key_values")
    mask = _two_dimensional(given, shape, cached=cache is not None)
    if cache is not None and given is not None and mask is None:
        return None  # generate() with a static cache: the dense mask it made says who sees whom
    if position_ids is not None:
        check_position_ids(position_ids, shape)
    if mask is not None and "cu_seq_lens_q" in lengths and lengths["cu_seq_lens_q"].numel() == shape[0] + 1:
        del lengths["cu_seq_lens_q"]  # 4.54's generate(): one sequence in each padded row; the mask says the same
    if (lengths or shape[1] > 1) and not compiling():
        _refuse_capture(device)
    if "cu_seq_lens_q" in lengths:
        found: Boundaries | None = from_cu_seqlens(
            lengths["cu_seq_lens_q"],
            lengths.get("max_length_q"),
            shape,
            cu_seqlens_k=lengths.get("cu_seq_lens_k"),
            position_ids=position_ids,
            attention_mask=mask,
        )
    elif shape[1] == 1:
        return None
    else:
        seq_idx = lengths.get("seq_idx")
        if position_ids is None and seq_idx is None and (mask is None or mask.dtype == torch.bool):
            return None
        found = recognise(
            shape,
            device,
            position_ids=position_ids,
            attention_mask=mask,
            seq_idx=seq_idx,
            only_certain=made_inside,
        )
    if found is None:
        return None
    _refuse_what_cannot_be_packed(call, given, mask)
    if position_ids is None:
        refuse_uncounted_pictures(patch.model, call)
        call["position_ids"] = positions_of(found.cu_seqlens.to(device), shape) + patch.first_position
    positions = found.positions
    if patch.rotary is not None:
        positions = largest(call["position_ids"]) + 1 if positions is None else positions
        patch.rotary.check(positions)
    if patch.rotary is not None or patch.tags_ids:
        call["position_ids"] = tagged(call["position_ids"], found)
    return PackedMask(
        found,
        patch.picks,
        shape,
        shape[1] if positions is None else positions,
        call["position_ids"],
        patch.rotary,
        patch.architecture,
    )


def _refuse_capture(device: torch.device) -> None:
    """A graph replays the longest length and the number of documents that it was captured with, whatever comes."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise PackingNotIsolated(
            "a CUDA graph is being captured: it would keep this batch's documents and compute others wrong. Capture "
            'nothing around a patched model; torch.compile(model, mode="reduce-overhead") looks at every batch.'
        )


def lengths_of(call: dict[str, Any]) -> dict[str, Any]:
    """The collator's lengths among the arguments; those of keys count for queries, where only they were given."""
    lengths = {name: call[name] for name in LENGTHS if call.get(name) is not None}
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if name in lengths:
            check_cu_seqlens(lengths[name])
            tokens = next((call[name] for name in ("input_ids", "inputs_embeds") if call.get(name) is not None), None)
            if lengths[name].device.type == "meta" and getattr(tokens, "device", None) != lengths[name].device:
                raise BadCuSeqlens("cu_seq_lens: expected a tensor with values, found one on the meta device.")
    if "cu_seq_lens_k" in lengths and "cu_seq_lens_q" not in lengths:
        lengths["cu_seq_lens_q"] = lengths["cu_seq_lens_k"]
        lengths["max_length_q"] = lengths.get("max_length_k")
    return lengths


def _two_dimensional(mask: Any, shape: tuple[int, int], cached: bool) -> torch.Tensor | None:
    """The mask of this call's tokens ``[batch, length]``; of a mask ``[batch, cached + length]`` its end."""
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.shape[0] != shape[0]:
        return None
    if mask.shape[1] == shape[1]:
        return mask
    return mask[:, -shape[1] :] if cached and mask.shape[1] > shape[1] else None


def has_pictures(call: dict[str, Any]) -> bool:
    return any(call.get(name) is not None for name in _PICTURES)


def refuse_uncounted_pictures(model: Any, call: dict[str, Any]) -> None:
    """Ids that count tokens are no ids of pictures: a model that has several axes would see others than alone."""
    if has_pictures(call) and any(hasattr(inner, "get_rope_index") for inner in models(model)):
        raise PackingNotIsolated(
            "a packed batch came with pictures and without position_ids, which this model counts on three axes in each "
            "document. Pass them, as fa2patch.DataCollatorForMultimodalFlattening gives them."
        )


def _refuse_what_cannot_be_packed(call: dict[str, Any], given: Any, mask: torch.Tensor | None) -> None:
    if given is not None and mask is None:
        found = f"{list(given.shape)}" if isinstance(given, torch.Tensor) else type(given).__name__
        raise PackedWithDenseMask(
            f"a packed batch came with an attention_mask {found}: expected none, or [batch, length] with zeros for "
            "padding. Leave it out: position_ids already say where documents start."
        )
    if call.get("past_key_values") is not None:
        raise PackedWithCache(
            "a packed batch came with past_key_values. What a cache holds belongs to no one document of the row. "
            "Leave the cache out (use_cache=False), or pass documents one by one."
        )
    if call.get("output_attentions"):
        raise PackingNotIsolated(
            "output_attentions=True was asked of a packed batch: flash attention makes no weights to return. "
            "Leave it out, or pass documents one by one."
        )


def with_mask(position_ids: torch.Tensor, mask: PackedMask) -> torch.Tensor:
    """The ids, a view of their own, on which what was found of them rides to the base model."""
    carrying = position_ids.view_as(position_ids)
    vars(carrying).update(vars(position_ids), **{_FOUND: mask})
    return carrying


def with_lengths(
    position_ids: torch.Tensor | None,
    lengths: dict[str, Any],
    shape: tuple[int, int],
    device: torch.device,
    first_position: int = 0,
) -> torch.Tensor | None:
    """The ids, a view of their own, on which the lengths ride from the causal LM to its base model."""
    if position_ids is None:
        cu = lengths.get("cu_seq_lens_q")
        if cu is None:
            found = recognise(shape, device, seq_idx=lengths.get("seq_idx"))
            if found is None:
                return None
            cu = found.cu_seqlens
        position_ids = positions_of(cu.to(device), shape) + first_position
    position_ids = position_ids.view_as(position_ids)
    setattr(position_ids, _CARRIED, lengths)
    return position_ids
