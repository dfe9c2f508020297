"""What the arguments of a forward say of documents, read and checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .._torch import compiling
from .._types import Call
from ..documents.checks import check_cu_seqlens, check_position_ids
from ..documents.media import MEDIA
from ..documents.names import LENGTHS, PARENTS, TOKENS
from ..errors import BadCuSeqlens, BadParents, PackingNotIsolated
from . import caches
from .calls import batch_shape, passed
from .step import Patched
from .traits import mixers


@dataclass(eq=False)
class Batch:
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

    @property
    def says_something(self) -> bool:
        """Whether an argument was given that may say where documents start."""
        return bool(self.lengths) or self.position_ids is not None or self.mask is not None


def read_batch(call: Call, patch: Patched) -> Batch | None:
    """Check the arguments that may say where documents start; None for a call that is dense in any case."""
    tokens = next(iter(passed(call, TOKENS).values()), None)
    if tokens is None:
        return None
    position_ids, lengths = call.get("position_ids"), passed(call, LENGTHS)
    if position_ids is None and getattr(tokens, "ndim", 0) < 2 and not lengths:
        return None  # GPT-2 accepts one row of ids without a batch dimension
    shape, device = batch_shape(call)
    _check_lengths(lengths, device)
    given, cached = call.get("attention_mask"), bool(caches.held(call))
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
    return Batch(shape, device, lengths, position_ids, mask)


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
    """Whether pictures, films or sound are among a forward's arguments."""
    return bool(passed(call, MEDIA))
