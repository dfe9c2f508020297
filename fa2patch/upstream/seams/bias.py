"""Position biases: what a layer adds to its scores for the distance of two tokens, as T5's do.

Such a layer looks up the bias of its whole row in a table, and adds it to its scores or hands it to its attention. The
bias of query i and key j of a document is that of tokens i and j of a row. So the layer is given the bias of the
longest document, ``[1, heads, longest, longest]``, of which attention uses a corner for each document.
"""

from __future__ import annotations

import functools
from itertools import chain
from typing import Any

import torch

from ..._types import Function
from .. import inspecting
from ..packed_mask import PackedMask, mask_among
from ..transformers_names import COMPUTES_BIAS, HAS_BIAS
from .layer_of_row import LayerOfRow


def computes_bias(forward: Function) -> bool:
    return COMPUTES_BIAS in inspecting.methods_called(forward)


def with_bias(original: Function) -> Function:
    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        mask = mask_among(chain(args, kwargs.values()))
        layer = self if mask is None else LayerOfRow(self, mask, of_longest(self, mask))
        return original(layer, *args, **kwargs)

    return forward


def of_longest(layer: Any, mask: PackedMask) -> dict[str, Any]:
    """The method and the flag that a layer sees in the place of its own."""

    def compute(self: Any, *lengths: Any, **more: Any) -> torch.Tensor:
        table = next((child for child in layer._modules.values() if isinstance(child, torch.nn.Embedding)), None)
        if table is None:  # cross attention: a bias of 0, which upstream makes for each query and key
            weight: torch.Tensor = next(layer.parameters())
            return weight.new_zeros(1, 1, 1, 1)
        longest = mask.longest
        bias: torch.Tensor = getattr(layer, COMPUTES_BIAS)(longest, longest, device=table.weight.device)
        return bias

    return {COMPUTES_BIAS: compute, HAS_BIAS: True}
