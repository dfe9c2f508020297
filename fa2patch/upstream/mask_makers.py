"""Find the functions that make 4-D masks for a model: methods of it, and functions in its modeling module."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any, Union

import torch

from .._types import Function, Model
from . import inspecting
from .other_code import is_known, is_of_model
from .transformers_names import CONVERTER, MASK_FUNCTIONS, MASK_MAKERS, MASK_METHODS, MASKING, UNMASK, dictionary_in

# the class or the modeling module in which a function that makes masks lies, and the name of its attribute
Maker = tuple[Union[type, ModuleType], str]


def makers(base_model: type) -> list[Maker]:
    own = [cls for cls in base_model.__mro__ if issubclass(cls, torch.nn.Module)]  # not a mix-in of all models
    found: list[Maker] = [
        (cls, name)
        for name in MASK_METHODS
        for cls in base_model.__mro__
        if name in vars(cls) and _makes_one(vars(cls)[name]) and (cls in own or calls_method(base_model, name))
    ]
    modules = dict.fromkeys(sys.modules[cls.__module__] for cls in base_model.__mro__ if "forward" in vars(cls))
    for module in modules:
        found += [
            (module, name) for name, value in vars(module).items() if MASK_MAKERS.fullmatch(name) and callable(value)
        ]
        converter = vars(module).get(CONVERTER)
        if converter is not None and UNMASK in vars(converter):
            found.append((converter, UNMASK))
    return found


def calls_method(model: type, name: str) -> bool:
    return any(inspecting.reads_name(forward, name) for forward in inspecting.forwards_that_run(model))


def of_the_user(model: Model, made_by: Iterable[Maker]) -> Any:
    # A packed mask would replace the user's function. Remote code's own function makes the masks of its own models, and
    # an override in a subclass is the user's.
    for owner, name in made_by:
        home = owner.__name__ if isinstance(owner, ModuleType) else owner.__module__
        function = getattr(owner, name)
        below = (vars(base).get(name) for base in type(model).__mro__ if base is not owner)
        overrides = any(inherited is not None and is_known(inherited) for inherited in below)
        if not is_known(function) and (overrides or not is_of_model(function, home)):
            return function
        on_the_object = vars(model).get(name)
        if on_the_object is not None and not is_known(on_the_object):
            return on_the_object
    config = getattr(model, "config", None)  # a layer by itself has none
    found = dictionary_in(MASKING, MASK_FUNCTIONS).get(getattr(config, "_attn_implementation", None))
    return None if found is None or is_known(found) else found


def _makes_one(method: Function) -> bool:
    # OPT's in 4.46 and 4.47 returns two masks, and makes them with functions that are replaced.
    return not inspecting.takes(method, "input_shape") or method.__name__ != MASK_METHODS[0]
