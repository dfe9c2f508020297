"""Spans in a packed batch: tokens of a picture, or of a prefix, that see each other in both directions."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ...documents.boundaries import Boundaries, largest
from ...documents.spans import last_seen
from ...errors import PackingNotIsolated
from ..blocks import Blocks
from ..packed_mask import PackedMask
from . import directions


class _Known(NamedTuple):
    """The last blocks that a batch's masks were made of, and the boundaries with their spans."""

    said: object
    boundaries: Boundaries


def seen(mask: PackedMask, blocks: Blocks | None) -> PackedMask:
    """A packed mask with the spans of some blocks, cut at the ends of documents. They are made once for each batch.

    Args:
        mask: the packed mask.
        blocks: what a function that makes masks was told; None returns the mask as it is.

    Raises:
        PackingNotIsolated: the blocks are no spans, or spans cannot be computed in this batch.
    """
    if blocks is None:
        _require_agreement(mask)
        return mask
    found = mask.boundaries
    if mask.part is not None or found.parents is not None:
        _refuse_blocks(mask, blocks)
        return mask
    known = found.made.get(_Known)
    if known is None or known.said is not blocks.said:
        until = last_seen(blocks.numbers, found.cu_seqlens, mask.shape, mask.real, blocks.prefixes)
        known = found.made[_Known] = _Known(blocks.said, replace(found, until=until, made={}))
    return replace(mask, boundaries=known.boundaries)


def _require_agreement(mask: PackedMask) -> None:
    """Raise if no mask says who sees whom in a model whose masks and layers differ without such a statement."""
    found = mask.found.get(directions.NAME)
    if found is not None and found.contradiction and mask.boundaries.until is None:
        raise PackingNotIsolated(
            f"{found.contradiction}, and the batch has no token_type_ids, which say which tokens see each other. Pass "
            "them as the processor gives them (for training: with the suffix)."
        )


def _refuse_blocks(mask: PackedMask, blocks: Blocks) -> None:
    """Raise for blocks in rows that are split over processes, or that share prompts. This reads them once."""
    if largest(blocks.numbers) < 0:
        return
    mask.require_whole_rows("tokens that see each other in both directions (a picture, or a prefix)")
    raise PackingNotIsolated(
        "a row with shared prompts (segment_parents) holds tokens that see each other in both directions (a picture, "
        "or a prefix), which is not computed. Give every sequence a document of its own."
    )


def refuse(mask: PackedMask, what: str) -> None:
    """Raise :class:`PackingNotIsolated` if a batch has spans, beside something that cuts documents."""
    if mask.boundaries.until is not None:
        raise PackingNotIsolated(
            f"tokens that see each other in both directions came to layers with {what}, which cut documents. Pack text "
            "only, or train padded."
        )
