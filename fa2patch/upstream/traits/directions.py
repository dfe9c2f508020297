"""Whether tokens see later ones: what a model's masks say, and what its attention layers do.

Eager attention does what the mask says. Every other implementation, and packed attention, does what the layer says.
Where the two differ, it is not known which of them is right, and the model is refused.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...errors import UnsupportedModel
from .. import inspecting
from ..looked import Looked
from .trait import Trait

NAME = "directions"
"""The trait's name, under which :class:`Found` is in ``Patch.found``."""

_MAKES = re.compile(r"create_\w*mask\w*")
_ADDS = "or_mask_function"
_FLAG = "use_bidirectional_attention"


class Found(NamedTuple):
    """What is known of the directions in which a model's tokens see each other.

    Attributes:
        both: whether a layer lets tokens see later ones, as an encoder's do.
        contradiction: what the masks say and the layers do not do; empty where they agree.
    """

    both: bool
    contradiction: str


class Directions(Trait):
    """A model whose masks and layers contradict each other is refused."""

    name = NAME

    def finds(self, model: Looked) -> Found:
        layers = [layer.module for layer in model.attention]
        return Found(sees_both_ways(model), contradiction(model.entered, layers))

    def refuses(self, model: Looked, found: Found) -> None:
        if found.contradiction:
            raise UnsupportedModel(
                f"{found.contradiction}: eager attention would go by the one, every other by the other, and what is "
                "right is not known. Nothing was patched. Change the config so that they agree, or train this model "
                "padded."
            )


def sees_both_ways(model: Looked) -> bool:
    """Whether an attention layer lets tokens see later ones."""
    return any(
        layer.fused or not getattr(layer.module, "is_causal", getattr(layer.module, "is_decoder", True))
        for layer in model.attention
    )


def contradiction(entered: Sequence[Any], layers: Sequence[Any]) -> str:
    """What a model's masks say and its layers do not do; empty where they agree or nothing is said.

    Args:
        entered: the models that a call goes through.
        layers: the attention layers, modules.
    """
    asked = {bool(getattr(layer, "is_causal", True)): layer for layer in layers}
    for model in entered:
        said = _causal_masks(model)
        layer = None if said is None else asked.get(not said)
        if layer is not None:
            return (
                f"{type(model).__name__}.forward makes masks in which tokens see {'no' if said else 'all'} later ones, "
                f"and its {type(layer).__name__} has is_causal={not said}"
            )
    return ""


def _causal_masks(model: Any) -> bool | None:
    """Whether the masks that a model's own ``forward`` makes hide later tokens; None where that cannot be read."""
    forward = next((vars(cls)["forward"] for cls in type(model).__mro__ if "forward" in vars(cls)), None)
    if inspecting.code_of(forward) is None:
        return None
    made = [name for name in inspecting.names_read(forward) if _MAKES.fullmatch(name)]
    if not made or any("bidirectional" in name for name in made):
        return None
    config = inspecting.text_config(model.config)
    scope = vars(sys.modules[forward.__module__])
    if made[0] in scope and is_two_sided(scope[made[0]], config):
        return False
    adds = inspecting.has_constant(forward, _ADDS) and inspecting.reads_name(forward, _FLAG)
    return not (adds_the_later_ones(config) and adds)


def adds_the_later_ones(config: Any) -> bool:
    """Whether a config says that all tokens see each other, in a model that is causal otherwise (EmbeddingGemma)."""
    return getattr(config, _FLAG, None) in (True, "all")


def is_two_sided(function: Any, config: Any) -> bool:
    """Whether a function makes masks in which tokens see later ones. Causal ones' do so for some configs (5.x)."""
    code = inspecting.code_of(function)
    turned = inspecting.has_constant(function, "is_causal") and not getattr(config, "is_causal", True)
    return turned or (code is not None and "bidirectional" in code.co_name)


def reach(window: int) -> int:
    """The distance from which two tokens are hidden from each other by upstream's two-sided window of this size."""
    masking = importlib.import_module("transformers.masking_utils")
    overlay = getattr(masking, "sliding_window_bidirectional_overlay", None)
    return window + 1 if overlay is not None and overlay(window)(0, 0, 0, window) else window
