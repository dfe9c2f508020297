"""Whether tokens see later ones: what a model's masks say, and what its attention layers do.

Eager attention does what the mask says, every other implementation (and packed attention) what the layer does. Where
the two differ nobody can say what the model is.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Sequence
from typing import Any

_MAKES = re.compile(r"create_\w*mask\w*")
_ADDS = "or_mask_function"
_FLAG = "use_bidirectional_attention"


def contradiction(entered: Sequence[Any], layers: Sequence[Any]) -> str:
    """What a model's masks say that its layers do not do; nothing where they agree, or nothing is said.

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
    """Whether the masks that a model's own ``forward`` makes hide later tokens; None where that cannot be told."""
    forward = next((vars(cls)["forward"] for cls in type(model).__mro__ if "forward" in vars(cls)), None)
    code = getattr(inspect.unwrap(forward), "__code__", None) if forward is not None else None
    if forward is None or code is None:
        return None
    made = [name for name in code.co_names if _MAKES.fullmatch(name)]
    if not made or any("bidirectional" in name for name in made):
        return None
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    scope = vars(sys.modules[forward.__module__])
    if made[0] in scope and is_two_sided(scope[made[0]], config):
        return False
    return not (adds_the_later_ones(config) and _ADDS in code.co_consts and _FLAG in code.co_names)


def adds_the_later_ones(config: Any) -> bool:
    """Whether a config says that all tokens see each other, in a model that is causal without (EmbeddingGemma)."""
    return getattr(config, _FLAG, None) in (True, "all")


def is_two_sided(function: Any, config: Any) -> bool:
    """Whether a function makes masks in which tokens see later ones; causal ones' too, for some configs (5.x)."""
    code = inspect.unwrap(function).__code__
    turned = "is_causal" in code.co_consts and not getattr(config, "is_causal", True)
    return turned or "bidirectional" in code.co_name


def reach(window: int) -> int:
    """From which distance on two tokens are hidden from each other by upstream's two-sided window of this size."""
    masking = importlib.import_module("transformers.masking_utils")
    overlay = getattr(masking, "sliding_window_bidirectional_overlay", None)
    return window + 1 if overlay is not None and overlay(window)(0, 0, 0, window) else window
