"""Windows that a config names and that a release of Transformers has in flash attention only.

Eager code is a model's definition. In Qwen2 from 4.43 to 4.49, Phi-3 and Starcoder 2 in 4.43, and Jamba it has no
window, and neither has sdpa, while the attention layer hands one to flash attention. Padded training then has the
window with flash attention alone, and so have packed rows. Elsewhere a window holds for every implementation.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from . import inspecting
from .facts import Facts
from .find_layers import Layer, ModelLayers
from .seams import formula
from .transformers_names import EAGER

WINDOW = "sliding_window"


def look(model: ModelLayers, facts: Facts) -> None:
    config = inspecting.text_config(model.decoder.config)
    size = getattr(config, WINDOW, None) if getattr(config, "use_sliding_window", True) else None
    # The attention layers hand a window to flash attention, and no code of the definition knows of one.
    hands_on = bool(size) and facts.architecture.adjust is None and any(map(_hands_on, model.attention))
    seen: set[CodeType] = set()
    facts.windows_of_flash = hands_on and not any(_knows(each, owner, seen) for owner, each in _definition(model))
    if facts.windows_of_flash and not inspecting.uses_flash(config):
        warnings.warn(
            f"{model}: config.{WINDOW} is {size}, and in this version of Transformers neither eager attention nor sdpa "
            "has a window, only flash attention. Packed rows have none either, so that they are what padded training "
            "computes. For the window, upgrade Transformers or load the model with "
            'attn_implementation="flash_attention_2".',
            UserWarning,
            stacklevel=2,
        )


def _hands_on(layer: Layer) -> bool:
    if layer.seam == "interface":
        return _named_in(inspecting.code_of(inspecting.forward_of(type(layer.module))))
    flash = layer.site.make.classes[1] if isinstance(layer.site.make, formula.ByFormula) else None
    return flash is not None and formula.Windows.of(flash).of_config


def _definition(model: ModelLayers) -> Iterator[tuple[Any, Any]]:
    # the functions that compute dense batches eagerly, each with the class whose methods it calls
    layers = {type(layer.module): layer for layer in model.attention}
    for cls in {*map(type, model.entered), *map(type, model.text_modules.values())}:
        layer = layers.get(cls)
        if layer is None:
            yield cls, inspecting.forward_of(cls)
        elif layer.seam == "interface":
            yield cls, getattr(layer.site.owner, EAGER, None)
        elif isinstance(layer.site.make, formula.ByFormula):
            plain = layer.site.make.classes[0]
            yield plain, inspecting.forward_of(plain)
        else:
            yield cls, vars(layer.site.owner)[layer.site.attribute][formula.EAGER]


def _knows(function: Any, owner: Any, seen: set[CodeType]) -> bool:
    # A function knows a window by name, as may one that it calls in its modeling file or hands a config to.
    code = inspecting.code_of(function)
    if code is None or code in seen:
        return False
    seen.add(code)
    if _named_in(code):
        return True
    own = inspect.unwrap(function)
    called = [found for name in code.co_names for found in (getattr(owner, name, None), own.__globals__.get(name))]
    return any(
        _knows(each, owner, seen)
        for each in called
        if isinstance(each, FunctionType) and (each.__module__ == own.__module__ or inspecting.takes(each, "config"))
    )


def _named_in(code: object) -> bool:
    if not isinstance(code, CodeType):  # a constant
        return code == WINDOW
    names = (*code.co_names, *code.co_varnames, *code.co_freevars)
    return any(WINDOW in name for name in names) or any(map(_named_in, code.co_consts))
