"""Functions that make 4-D masks (``find_masks.py``) are replaced, so that a packed batch keeps its packed mask."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from typing import Any

from ..._torch import constant
from ..._types import Config, Function
from ...errors import PackingNotIsolated, UnsupportedModel
from .. import blocks, inspecting
from ..find_masks import FUNCTIONS, METHODS, TWO_MASKS, makers, registered
from ..known_code import described
from ..looked import Looked
from ..packed_mask import PackedMask, find
from ..site import Site
from . import directions, spans
from .trait import Trait

MERGE = "_merge_input_ids_with_image_features"
"""A method that puts pictures into the row. PaliGemma's (4.41 to 4.44) also makes the mask and the position ids."""


class Masks(Trait):
    """Replace the functions that make masks for the models that a call goes through."""

    name = "masks"

    def refuses(self, model: Looked, found: Any) -> None:
        for cls in map(type, model.entered):
            merge = getattr(cls, MERGE, None)
            if merge is not None and inspecting.takes(merge, blocks.TYPES):
                raise UnsupportedModel(
                    f"{cls.__name__} makes the mask of its prefix while it merges pictures into the row, and makes "
                    "position ids of its own there. Nothing was patched. Upgrade Transformers (PaliGemma is packed "
                    "from 4.45 on), or train this model padded."
                )

    def replaces(self, model: Looked, found: Any) -> Iterable[Site]:
        owners = (owner for inner in model.entered for owner in makers(type(inner)))
        return [Site(owner, name, let_through) for owner, name in owners]


def let_through(original: Function) -> Function:
    """Replacement for a function that makes masks: it returns the packed mask that is among its arguments.

    The packed mask gets the spans that the function is told of (:mod:`~fa2patch.upstream.blocks`), and the sliding
    window or the chunks that the function would have put into its mask. This is necessary for Qwen2MoE in 5.x, whose
    attention layers do not pass their window on to flash attention.

    Args:
        original: the function that is replaced. It is called if there is no packed mask.

    Returns:
        The replacement. It raises :class:`PackingNotIsolated` if tokens would see later ones in a way that is not known
        or cannot be computed.
    """
    names = inspecting.parameter_names(original)
    passes_on = _hands_blocks_on(original)

    @functools.wraps(original)
    def make_mask(*args: Any, **kwargs: Any) -> Any:
        mask = find(chain(args, kwargs.values()))
        if mask is None or passes_on:
            return original(*args, **kwargs)
        given = {**dict(zip(names, args)), **kwargs}
        _require_upstreams(given.get("config"))
        told = blocks.blocks_of(original, given)
        mask = spans.seen(mask, told)
        if told is not None and original.__name__ in METHODS:
            return replace(mask, outright=True)
        if told is not None and blocks.window_of(given) is not None:
            return replace(mask, window=blocks.window_of(given))
        if original.__name__ == TWO_MASKS:
            return mask, mask
        if "chunked" in original.__name__:
            return _chunked(mask, given["config"])
        if "chunked_attention_mask" in names:  # Llama 4 in 4.51 and 4.52 makes two masks
            return mask, _chunked(mask, given["self"].config)
        if "sliding_window" in original.__name__ and mask.outright:
            return replace(mask, window=0)
        if "sliding_window" in original.__name__:
            window = getattr(given.get("config"), "sliding_window", None) or None
            if window and directions.is_two_sided(original, given["config"]):
                window = directions.reach(window)
            return replace(mask, window=window)
        return mask

    return make_mask


def _require_upstreams(config: Config | None) -> None:
    """Raise :class:`PackingNotIsolated` if a dense batch's mask would be made by the user's registered function."""
    own = _registered(getattr(config, "_attn_implementation", None))
    if own:
        raise PackingNotIsolated(
            f"masks are made by {own}, which was not there when the model was patched, and which a packed mask would "
            "replace. Call fa2patch.apply(model) again: then each document is computed by itself, with your function."
        )


@constant
def _registered(implementation: object) -> str:
    found = registered(implementation)
    return "" if found is None else described(found)


def _hands_blocks_on(function: Function) -> bool:
    """Whether a function of a modeling module has its masks made by others there, which are told of blocks.

    In 5.0 it is given ``token_type_ids`` (Gemma 4: ``mm_token_type_ids``). In 5.23 it is given the numbers of blocks,
    and in Gemma 4 only the mask of sliding layers has them.
    """
    told = (blocks.TYPES, blocks.MEDIA_TYPES, blocks.NUMBERS)
    given = any(inspecting.has_variable(function, name) for name in told) or inspecting.has_constant(
        function, blocks.ADDED
    )
    own = "masking_utils" not in function.__module__  # its functions are replaced in modeling modules only
    return given and own and any(FUNCTIONS.fullmatch(name) for name in inspecting.names_read(function))


def _chunked(mask: PackedMask, config: Config) -> PackedMask:
    if mask.rows[1] <= config.attention_chunk_size:
        return mask  # no document is longer than its row
    spans.refuse(mask, "chunks (attention_chunk_size)")
    rows = mask.rows
    return replace(mask, boundaries=mask.boundaries.chunked(config.attention_chunk_size, rows[0] * rows[1]))
