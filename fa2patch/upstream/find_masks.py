"""Find the functions that make 4-D masks for a model.

They are:

- 4.34: ``Model._prepare_decoder_attention_mask`` (Falcon: ``_prepare_attn_mask``)
- 4.35 on: ``_prepare_4d_*`` in the modeling module
- 4.38 to 4.52: ``Model._update_causal_mask``, and on a GPU ``AttentionMaskConverter`` as well
- ``Model.get_extended_attention_mask`` of encoders (up to 4.57), which makes a causal mask if they are decoders
- 4.53 on: ``create_*_mask`` in the modeling module, which look up a function in ``ALL_MASK_ATTENTION_FUNCTIONS``
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any, Union

import torch

from .._types import Function, Model
from . import inspecting
from .foreign import is_known, is_of_model

TWO_MASKS = "_update_attention_mask"
"""ModernBERT's method (4.48 to 5.0), which returns a mask for global and one for local layers."""

METHODS = (
    "_update_causal_mask",
    "_prepare_decoder_attention_mask",
    "_prepare_attn_mask",
    "_update_linear_attn_mask",
    "_update_mamba_mask",
    "get_extended_attention_mask",
    TWO_MASKS,
)
FUNCTIONS = re.compile(r"create_\w*masks?(_mapping|_for_generate|_for_vision_model)?|_prepare_4d_\w+")
UNMASK = "_unmask_unattended"

REGISTERED = "transformers.masking_utils", inspecting.MASK_FUNCTIONS
"""Where the dictionary of functions that make masks is, by ``attn_implementation``."""


Maker = tuple[Union[type, ModuleType], str]
"""Where a function lies that makes masks: the class or the modeling module, and the name of its attribute."""


def makers(base_model: type) -> list[Maker]:
    """Where the functions lie that make masks for this class of models, or for a class that it inherits from."""
    own = [cls for cls in base_model.__mro__ if issubclass(cls, torch.nn.Module)]  # not a mix-in of all models
    found: list[Maker] = [
        (cls, name)
        for name in METHODS
        for cls in base_model.__mro__
        if name in vars(cls) and _makes_one(vars(cls)[name]) and (cls in own or calls_method(base_model, name))
    ]
    modules = dict.fromkeys(sys.modules[cls.__module__] for cls in base_model.__mro__ if "forward" in vars(cls))
    for module in modules:
        found += [
            (module, name) for name, value in vars(module).items() if FUNCTIONS.fullmatch(name) and callable(value)
        ]
        converter = vars(module).get("AttentionMaskConverter")
        if converter is not None and UNMASK in vars(converter):
            found.append((converter, UNMASK))
    return found


def calls_method(model: type, name: str) -> bool:
    """Whether the ``forward`` of a class of models calls a method or a function of this name."""
    return any(inspecting.reads_name(forward, name) for forward in inspecting.forwards_that_run(model))


def of_the_user(model: Model, made_by: Iterable[Maker]) -> Any:
    """The user's among the functions that make masks for a model, which a packed mask would replace; None if none is.

    Remote code's own function makes the masks of its own models, and an override in a subclass is the user's.
    """
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
    return registered_by_the_user(getattr(config, "_attn_implementation", None))


def registered_by_the_user(implementation: object) -> Any:
    """The user's function in the dictionary of functions that make masks; None for Transformers' own, or for none."""
    found = inspecting.dictionary_in(*REGISTERED).get(implementation)
    return None if found is None or is_known(found) else found


def _makes_one(method: Function) -> bool:
    """Whether a method returns one mask.

    OPT's in 4.46 and 4.47 returns two, and makes them with functions that are replaced.
    """
    return not inspecting.takes(method, "input_shape") or method.__name__ != METHODS[0]
