"""Position ids on several axes (mRoPE): some decoders take the text positions as a fourth axis, in front."""

from __future__ import annotations

from typing import Any

import torch

from ..._types import Config, Function, Model
from .. import inspecting
from ..step import Step
from .trait import Trait


class Axes(Trait):
    """Drop the text axis of four-axis position ids where the decoder takes three axes."""

    name = "axes"

    def before(self, step: Step, found: Any) -> None:
        ids = step.call.get("position_ids")
        if ids is not None and not step.by_hook:
            step.call["position_ids"] = without_text_axis(step.module, step.calls.original, ids)


def takes_text_axis(decoder: Model) -> bool:
    """Whether a decoder takes position ids ``[4, batch, length]`` with the text axis first. Most do from 4.54 on.

    The forward of such a decoder compares the number of axes with 4. There is no other sign: the other decoders use
    the first three of four axes and raise no error.
    """
    return inspecting.has_constant(type(decoder).forward, 4)


def without_text_axis(model: Model, forward: Function, position_ids: Any) -> Any:
    """Position ids without the text axis, if they have four axes and the decoder takes three; otherwise unchanged.

    Args:
        model: the decoder.
        forward: its forward before it was patched.
        position_ids: ``[4, batch, length]`` with the text axis first, or anything else.
    """
    if not isinstance(position_ids, torch.Tensor) or position_ids.dim() != 3 or len(position_ids) != 4:
        return position_ids
    loops = isinstance(model._modules.get("layers"), torch.nn.ModuleList)
    takes_four = inspecting.has_constant(forward, 4)
    return position_ids[1:] if loops and _rotates_by_three(model.config) and not takes_four else position_ids


def _rotates_by_three(config: Config) -> bool:
    settings = [getattr(config, name, None) for name in ("rope_scaling", "rope_parameters")]
    return any(len(found["mrope_section"]) == 3 for found in settings if found and "mrope_section" in found)
