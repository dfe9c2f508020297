"""Blocks of tokens that see each other in both directions, as a function that makes masks is told of them.

The functions are:

- 4.45 to 4.57: PaliGemma's ``_update_causal_mask``. With labels, all tokens see the tokens of type 0, which are the
  prefix with the picture. Without labels, all tokens see each other.
- 4.50 to 4.52: Gemma 3's ``_update_causal_mask``. Each run of tokens of type 1 is a picture. In the first of these
  versions, all pictures of a row see each other.
- 4.53 to 5.9: functions with ``or_mask_function``, a closure over the numbers of blocks. In 5.23, sliding
  layers have it.
- 5.10 on: functions with ``block_sequence_ids``, the numbers of blocks
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .._types import Call, Function
from ..documents.boundaries import largest
from ..errors import PackingNotIsolated
from . import inspecting
from .traits import directions

TYPES = "token_type_ids"
MEDIA_TYPES = "mm_token_type_ids"
"""The name of the types of Gemma 4's tokens."""

ADDED = "or_mask_function"
CUT = "and_mask_function"
NUMBERS = "block_sequence_ids"

_NUMBERED = "image_group_ids"
"""The name that Gemma 3 and the closures up to 5.4 give to the numbers of the pictures' blocks."""

_HELD = (NUMBERS, "group_ids", _NUMBERED)
"""The names that closures give to them, the newest first."""

_BY_DISTANCE = "tokens_per_image"
"""A variable of 4.53's closure: tokens of type 1 that are no farther apart see each other, in several pictures too."""

_COMPARED = "token_type_mask"
"""A variable of Gemma 3's ``_update_causal_mask``, which compares the types of two tokens."""


class Blocks(NamedTuple):
    """The blocks of a batch.

    Attributes:
        numbers: integers ``[batch or 1, length]``. Neighbours with the same number of 0 or more see each other.
        said: the object that said so. A second function that is given the same one is told of the same blocks.
        prefixes: whether all tokens of a document see its block, which then must begin the document.
    """

    numbers: torch.Tensor
    said: object
    prefixes: bool = False


def blocks_of(function: Function, given: Call) -> Blocks | None:
    """The blocks that a function which makes masks is told of; None for a causal mask, or where all layers look ahead.

    Args:
        function: the function.
        given: its arguments by name.

    Raises:
        PackingNotIsolated: it lets tokens see later ones in a way that is not known.
    """
    added = given.get(ADDED)
    if added is not None:
        found = _of_closure(added)
        if found is not None and (given.get(CUT) is None or window_of(given) is not None):
            return found
        if not directions.adds_the_later_ones(given.get("config")):  # else all layers look ahead, as apply has checked
            raise _unknown(function, ADDED)
    if given.get(NUMBERS) is not None:
        return Blocks(given[NUMBERS], given[NUMBERS])
    types = given.get(TYPES)
    if inspecting.has_variable(function, _COMPARED):
        numbered = inspecting.has_variable(function, _NUMBERED)
        return None if types is None else Blocks(_pictures(types) if numbered else types - 1, types)
    if inspecting.has_variable(function, TYPES) and inspecting.has_variable(function, "is_training"):
        return _prefix(given, types)
    for name in (TYPES, MEDIA_TYPES):
        if given.get(name) is not None and largest(given[name]) > 0:
            raise _unknown(function, name)
    return None


def _of_closure(added: object) -> Blocks | None:
    held = inspecting.enclosed_by_name(added)
    types, numbers = held.get(TYPES), next((held[name] for name in _HELD if name in held), None)
    if _BY_DISTANCE in held and isinstance(types, torch.Tensor):
        return Blocks(types - 1, types)
    return Blocks(numbers, numbers) if isinstance(numbers, torch.Tensor) else None


def window_of(given: Call) -> int | None:
    """The sliding window, in tokens, that a function adds to a mask with blocks; None if it adds none."""
    window = inspecting.enclosed_by_name(given.get(CUT)).get("sliding_window")
    return window if isinstance(window, int) else None


def _pictures(types: torch.Tensor) -> torch.Tensor:
    """A number for each run of tokens of type 1, and -1 for other tokens."""
    inside = types == 1
    first = inside & ~torch.nn.functional.pad(inside, (1, 0))[:, :-1]
    return torch.where(inside, first.long().cumsum(1) - 1, -1)


def _prefix(given: Call, types: Any) -> Blocks:
    training = given.get("is_training")
    if training is None:
        training = given["self"].training
    if training and types is not None:
        return Blocks(torch.where(types == 0, 0, -1), types, prefixes=True)
    everything = torch.zeros(1, 1, dtype=torch.int64)
    return Blocks(everything, None)


def _unknown(function: Function, name: str) -> PackingNotIsolated:
    return PackingNotIsolated(
        f"{function.__name__} was called with {name}: in this model some tokens see later ones, and what this version "
        "of Transformers lets them see is not known. Pack text only, or train padded. Please report the model."
    )
