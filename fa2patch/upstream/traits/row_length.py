"""Rotary modules that a decoder gives the number of tokens (PhiMoE up to 4.57), as the size of their table."""

from __future__ import annotations

from typing import Any

import torch

from .. import inspecting
from ..calls import batch_shape
from ..looked import Looked
from ..rope import MODULES
from ..step import Step
from .trait import Trait


class RowLength(Trait):
    """Tell the decoder the places of a part's tokens in the row, from which it computes the size.

    Position ids of a part may be larger than its length.
    """

    name = "row length"

    def finds(self, model: Looked) -> bool | None:
        rotary = (module for name, module in model.decoder.named_children() if name in MODULES)
        return True if any(inspecting.takes(module.forward, "seq_len") for module in rotary) else None

    def before(self, step: Step, found: Any) -> None:
        part = None if step.mask is None else step.mask.part
        if part is None or not step.role.innermost or not step.calls.takes("cache_position"):
            return
        (_, length), device = batch_shape(step.call)
        step.call["cache_position"] = torch.arange(length, device=device) + part.number * length
