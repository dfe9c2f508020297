"""Router losses that are not given the mask (Mixtral's in 4.37): they would count padding.

From 4.38 on, a model hands its mask on to the function that computes the loss. In 4.36 the loss is a constant.
"""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any

import torch

from .. import inspecting
from ..looked import Looked
from ..packed_mask import MASK
from ..step import Step
from .trait import Trait

LOGITS = "router_logits"
"""The field of the base model's output that every causal LM with a router loss reads."""


class RouterLoss(Trait):
    """Hand the causal LM the router logits of real tokens only."""

    name = "router loss"

    def finds(self, model: Looked) -> bool | None:
        around = [forward for each in model.entered[:-1] for forward in inspecting.forwards_that_run(type(each))]
        reads = [forward for forward in around if inspecting.reads_name(forward, LOGITS)]
        weighs = any(inspecting.takes(function, MASK) for forward in reads for function in _called(forward))
        return True if reads and not weighs else None

    def after(self, step: Step, found: Any, output: Any) -> Any:
        if step.mask is None or step.mask.real is None or not step.role.innermost:
            return output
        real = step.mask.real.flatten() != 0
        if isinstance(output, tuple):  # return_dict=False
            return tuple(_of_real(value, real) for value in output)
        for name, value in list(output.items()):
            output[name] = _of_real(value, real)
        return output


def _called(forward: Any) -> list[FunctionType]:
    """The functions of a modeling module that a forward may call."""
    known = inspect.unwrap(forward).__globals__
    return [known[name] for name in inspecting.names_read(forward) if isinstance(known.get(name), FunctionType)]


def _of_real(value: Any, real: torch.Tensor) -> Any:
    """Each layer's router logits ``[tokens, experts]`` of real tokens, from those of all; other values as they are."""
    if not isinstance(value, tuple) or not all(_for_each(layer, real) for layer in value):
        return value
    return tuple(layer[real.to(layer.device)] for layer in value)


def _for_each(layer: Any, real: torch.Tensor) -> bool:
    return isinstance(layer, torch.Tensor) and layer.dim() == 2 and len(layer) == len(real)
