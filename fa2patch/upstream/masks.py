"""Functions that make masks are replaced, so that a packed batch keeps its packed mask with their windows and blocks.

Blocks are tokens that see each other in both directions (a picture, or a prefix).
"""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch

from .._torch import constant
from .._types import Call, Config, Function
from ..documents.boundaries import Boundaries
from ..documents.spans import last_seen
from ..documents.tensors import largest
from ..errors import PackingNotIsolated, UnsupportedModel
from . import directions, inspecting, mask_makers
from .facts import Facts, Site
from .find_layers import ModelLayers
from .other_code import is_known, where_defined
from .packed_mask import PackedMask, mask_among
from .transformers_names import MASK_FUNCTIONS, MASK_MAKERS, MASK_METHODS, MASKING, TWO_MASKS, dictionary_in

TYPES = "token_type_ids"
MEDIA_TYPES = "mm_token_type_ids"  # the types of Gemma 4's tokens

CUT = "and_mask_function"
NUMBERS = "block_sequence_ids"

_NUMBERED = "image_group_ids"  # the numbers of the pictures' blocks in Gemma 3 and the closures up to 5.4

_HELD = (NUMBERS, "group_ids", _NUMBERED)  # the names that closures give to them, the newest first


class Blocks(NamedTuple):
    """The blocks of a batch."""

    # integers [batch or 1, length]; neighbours with the same number of 0 or more see each other
    numbers: torch.Tensor
    said: object  # a second function that is given the same object is told of the same blocks
    prefixes: bool = False  # all tokens of a document see its block, which then must begin the document


def blocks_of(function: Function, variables: frozenset[str], given: Call) -> Blocks | None:
    """The blocks that are named to a function that makes masks. None if there are none, or all layers look ahead."""
    # From 4.53 to 5.9 a closure over the numbers of blocks is given. In 5.23, sliding layers have it.
    added = given.get(directions.ADDED)
    if added is not None:
        found = _of_closure(added)
        if found is not None and (given.get(CUT) is None or window_of(given) is not None):
            return found
        if not directions.adds_the_later_ones(given.get("config")):  # else all layers look ahead, as apply has checked
            raise _unknown(function, directions.ADDED)
    if given.get(NUMBERS) is not None:  # from 5.10 on
        return Blocks(given[NUMBERS], given[NUMBERS])
    types = given.get(TYPES)
    # From 4.50 to 4.52, Gemma 3's `_update_causal_mask` takes each run of tokens of type 1 for a picture. In the first
    # of these versions, all pictures of a row see each other.
    if "token_type_mask" in variables:
        numbered = _NUMBERED in variables
        return None if types is None else Blocks(_pictures(types) if numbered else types - 1, types)
    # From 4.45 to 4.57, PaliGemma's `_update_causal_mask` lets all tokens see the tokens of type 0 (the prefix with the
    # picture) if there are labels, and all tokens see each other if there are none.
    if TYPES in variables and "is_training" in variables:
        training = given.get("is_training")
        if (given["self"].training if training is None else training) and types is not None:
            return Blocks(torch.where(types == 0, 0, -1), types, prefixes=True)
        return Blocks(torch.zeros(1, 1, dtype=torch.int64), None)  # all tokens
    for name in (TYPES, MEDIA_TYPES):
        if given.get(name) is not None and largest(given[name]) > 0:
            raise _unknown(function, name)
    return None


def _of_closure(added: object) -> Blocks | None:
    held = inspecting.enclosed(added)
    types, numbers = held.get(TYPES), next((held[name] for name in _HELD if name in held), None)
    if "tokens_per_image" in held and isinstance(types, torch.Tensor):
        return Blocks(types - 1, types)  # 4.53: tokens of type 1 that are no farther apart, in several pictures too
    return Blocks(numbers, numbers) if isinstance(numbers, torch.Tensor) else None


def window_of(given: Call) -> int | None:
    window = inspecting.enclosed(given.get(CUT)).get("sliding_window")
    return window if isinstance(window, int) else None


def _pictures(types: torch.Tensor) -> torch.Tensor:
    inside = types == 1
    first = inside & ~torch.nn.functional.pad(inside, (1, 0))[:, :-1]
    return torch.where(inside, first.long().cumsum(1) - 1, -1)


def _unknown(function: Function, name: str) -> PackingNotIsolated:
    return PackingNotIsolated(
        f"{function.__name__} was called with {name}: in this model some tokens see later ones, and what this version "
        "of Transformers lets them see is not known. Pack text only, or train padded. Please report the model."
    )


def with_spans(mask: PackedMask, blocks: Blocks | None) -> PackedMask:
    # The spans are cut at the ends of documents, and made once for each batch.
    found = mask.boundaries
    if blocks is None:
        if mask.facts.contradiction and found.until is None:
            raise PackingNotIsolated(
                f"{mask.facts.contradiction}, and the batch has no token_type_ids, which say which tokens see each "
                "other. Pass them as the processor gives them (for training: with the suffix)."
            )
        return mask
    if mask.part is not None or found.parents is not None:
        if largest(blocks.numbers) < 0:  # this reads them
            return mask
        tokens = "tokens that see each other in both directions (a picture, or a prefix)"
        mask.require_whole_rows(tokens)
        raise PackingNotIsolated(
            f"a row with shared prompts (segment_parents) holds {tokens}, which is not computed. Give every sequence a "
            "document of its own."
        )
    known: tuple[object, Boundaries] | None = found.made.get(Blocks)
    if known is None or known[0] is not blocks.said:
        until = last_seen(blocks.numbers, found.cu_seqlens, mask.shape, mask.real, blocks.prefixes)
        known = found.made[Blocks] = blocks.said, replace(found, until=until, made={})
    return replace(mask, boundaries=known[1])


def look(model: ModelLayers, facts: Facts) -> list[Site]:
    for cls in map(type, model.entered):
        # it puts pictures into the row; PaliGemma's (4.41 to 4.44) also makes the mask and the position ids
        merge = getattr(cls, "_merge_input_ids_with_image_features", None)
        if merge is not None and inspecting.takes(merge, TYPES):
            raise UnsupportedModel(
                f"{cls.__name__} makes the mask of its prefix while it merges pictures into the row, and makes "
                "position ids of its own there. Nothing was patched. Upgrade Transformers (PaliGemma is packed "
                "from 4.45 on), or train this model padded."
            )
    makers = list(chain.from_iterable(model.mask_makers.values()))
    outermost = type(model.model)
    facts.makes_masks = len(model.entered) > 1 and any(
        mask_makers.calls_method(outermost, name) for owner, name in makers if owner in outermost.__mro__
    )
    return [Site(owner, name, let_through) for owner, name in makers]


def let_through(original: Function) -> Function:
    """Replacement for a function that makes masks: it returns the packed mask that is among its arguments."""
    # The packed mask gets the sliding window or the chunks that the function would have put into its mask. Qwen2MoE in
    # 5.x needs that: its attention layers do not pass their window on to flash attention.
    names, variables = inspecting.parameter_names(original), inspecting.variables_of(original)
    # Some have their masks made by others in their modeling module, which are told of blocks. In 5.0 they are given
    # `token_type_ids` (Gemma 4: `mm_token_type_ids`). In 5.23 they are given the numbers of blocks, and in Gemma 4 only
    # the mask of sliding layers has them. Functions of masking_utils are replaced in modeling modules only.
    knows = not variables.isdisjoint((TYPES, MEDIA_TYPES, NUMBERS)) or inspecting.has_constant(
        original, directions.ADDED
    )
    own = original.__module__ not in MASKING
    passes_on = knows and own and any(map(MASK_MAKERS.fullmatch, inspecting.names_read(original)))

    @functools.wraps(original)
    def make_mask(*args: Any, **kwargs: Any) -> Any:
        mask = mask_among(chain(args, kwargs.values()))
        if mask is None or passes_on:
            return original(*args, **kwargs)
        given = {**dict(zip(names, args)), **kwargs} if args else kwargs
        own = _registered(getattr(given.get("config"), "_attn_implementation", None))
        if own:
            raise PackingNotIsolated(
                f"masks are made by {own}, which was not there when the model was patched, and which a packed mask "
                "would replace. Call fa2patch.apply(model) again: then each document is computed by itself, with your "
                "function."
            )
        # whatever is added to the mask of an encoder's layers, or of cross attention, is seen already (T5Gemma)
        see_all = mask.boundaries.sources is not None or (mask.facts.both_ways and not mask.facts.contradiction)
        told = None if see_all else blocks_of(original, variables, given)
        if told is not None or mask.facts.contradiction:
            mask = with_spans(mask, told)
        return _as_made_by(original, names, given, told, mask)

    return make_mask


def _as_made_by(function: Function, names: list[str], given: Call, told: Blocks | None, mask: PackedMask) -> Any:
    if told is not None and function.__name__ in MASK_METHODS:
        return replace(mask, outright=True)
    if told is not None and window_of(given) is not None:
        return replace(mask, window=window_of(given))
    if function.__name__ == TWO_MASKS:
        return mask, replace(mask, window=given["self"].config.local_attention // 2 + 1)
    if "chunked" in function.__name__:
        return _chunked(mask, given["config"])
    if "chunked_attention_mask" in names:  # Llama 4 in 4.51 and 4.52 makes two masks
        return mask, _chunked(mask, given["self"].config)
    if "sliding_window" in function.__name__:
        window = 0 if mask.outright else getattr(given.get("config"), "sliding_window", None) or None
        if window and directions.is_two_sided(function, given["config"]):
            window = directions.reach(window)
        return replace(mask, window=window)
    return mask


@constant
def _registered(implementation: object) -> str:
    # where the user's function that would make the mask of a dense batch is defined; empty if it is upstream's
    function = dictionary_in(MASKING, MASK_FUNCTIONS).get(implementation)
    known = _of_the_user.get(implementation)
    if known is None or known[0] is not function:
        own = function is not None and not is_known(function)
        known = _of_the_user[implementation] = function, where_defined(function) if own else ""
    return known[1]


# functions that were looked at, by implementation: to ask whose code one is takes ten calls in every batch
_of_the_user: dict[Any, tuple[Any, str]] = {}


def _chunked(mask: PackedMask, config: Config) -> PackedMask:
    rows, size = mask.rows, config.attention_chunk_size
    if rows[1] <= size:
        return mask  # no document is longer than its row
    if mask.boundaries.until is not None:
        raise PackingNotIsolated(
            "tokens that see each other in both directions came to layers with chunks (attention_chunk_size), which "
            "cut documents. Pack text only, or train padded."
        )
    return replace(mask, boundaries=mask.boundaries.chunked(size, rows[0] * rows[1]))
