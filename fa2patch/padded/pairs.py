"""Packed computation of padded pairs: each stack of an encoder-decoder computes its own padded rows packed.

The decoder gets rows of states, as from any encoder, and lays them end to end (``upstream/cross.py``).
Whatever is around the stacks, a head and a loss, gets padded rows, as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import torch

from .._types import Args, Call, Model
from ..documents.names import LABELS, OF_TARGETS, TOKENS
from ..upstream import attached
from ..upstream.calls import passed
from ..upstream.find_models import models, stacks_of
from ..upstream.packed_mask import MASK
from ..upstream.pairs import SAYS_ALL, masks_of
from ..upstream.step import MARK, PADDING
from . import head_calls
from .batches import PaddedBatches, mask_of_labels, warn_once

_UNPROVEN = (
    "it holds code that is proven with packed pairs, and these rows are none (their labels are not tokens of targets, "
    "or a row is empty). If its code keeps documents apart, call fa2patch.apply(model, padded_batches=True, "
    "prove=False)"
)


class PaddedPairs(head_calls.Around):
    """Makes an encoder-decoder compute padded pairs packed."""

    share_prompts = False  # targets that begin alike have other sources

    def __init__(self, model: Model) -> None:
        self.base = model
        stacks = [stack for stack in stacks_of(model) or () if MARK in vars(stack)]
        self.stacks = [PaddedBatches(models(stack)[-1], of_pairs=True) for stack in stacks]
        self._warned: set[str] = set()
        model.__dict__[PADDING] = self

    def remove(self) -> None:
        for stack in self.stacks:
            stack.remove()
        if self.base.__dict__.get(PADDING) is self:
            del self.base.__dict__[PADDING]

    def computed(
        self, forward: Callable[[Any, Args, Call], Any], module: Any, args: Args, kwargs: Call, names: Sequence[str]
    ) -> Any:
        patch, call = module.__dict__.get(MARK), {**dict(zip(names, args)), **kwargs}
        if patch is not None and patch.must_prove() and not passed(call, SAYS_ALL):
            packed = as_packed(call)
            if packed is None:
                warn_once(self._warned, module, _UNPROVEN)
                return forward(module, args, kwargs)
            _, targets = masks_of(module, packed)
            if targets is not None:  # there are several pairs
                patch.examine(module, packed, targets)
        return super().computed(forward, module, args, kwargs, [*names])

    def __enter__(self) -> PaddedPairs:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def as_packed(call: Call) -> Call | None:
    """The padded pairs of a call as packed ones. None if it has no targets, or labels that are not theirs."""
    labels = call.get(LABELS[0])
    of_sources, given = passed(call, TOKENS), passed(call, [OF_TARGETS + name for name in TOKENS])
    if (labels is None and not given) or (labels is not None and labels.dim() != 2):
        return None
    found = {name: value for name, value in call.items() if name not in (MASK, OF_TARGETS + MASK)}
    of_targets, learned = given, None
    if labels is not None:
        of_targets, learned = {**given, LABELS[0]: labels}, mask_of_labels(labels)
    for prefix, tokens, otherwise in (("", of_sources, None), (OF_TARGETS, of_targets, learned)):
        if not tokens:  # sounds
            continue
        real = call.get(prefix + MASK)
        real = otherwise if real is None else real
        rows = next(iter(tokens.values()))
        real = torch.ones_like(rows[:, :, 0] if rows.dim() > 2 else rows) if real is None else real
        if not isinstance(real, torch.Tensor) or bool((real == 0).all(1).any()):
            return None
        found.update({name: value[real != 0][None] for name, value in tokens.items()})
        ids = (real != 0).cumsum(1)[real != 0][None] - 1
        found[f"{prefix}position_ids"] = attached.attach(ids, attached.Piece(attached.PADDING, real.numel()))
    return found
