"""Caches and states of earlier tokens among a forward's arguments, known by what they are.

The argument has had many names, and in 5.24 a new one, ``cache``.
"""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import torch

from .._types import Call, Function
from . import inspecting

# Names of a cache or a state in releases whose annotations name tuples of tensors, or nothing. The states of these
# releases may be flat lists of tensors (RWKV's), which nothing else tells from other arguments.
_OLD_NAMES = ("past_key_values", "past_key_value", "layer_past", "cache_params", "state")

# What is no cache. A graph that is being captured knows its own numbers by these types, and nothing else of them.
_PLAIN = (torch.Tensor, bool, int, float, str)


def held(call: Call) -> Call:
    found = {}
    for name, value in call.items():
        if value is not None and (name in _OLD_NAMES or (not isinstance(value, _PLAIN) and is_cache(value))):
            found[name] = value
    return found


def is_cache(value: object) -> bool:
    # A cache has `update` and `get_seq_length`. Up to 4.47 it may be a tuple of tuples of tensors, one for each layer.
    # Mamba's and xLSTM's caches have neither method in some releases: they are objects with floating-point tensors in
    # their attributes. Outputs of other models (`encoder_outputs`) are mappings or flat tuples, and no caches.
    if value is None or isinstance(value, _PLAIN):
        return False
    if isinstance(value, (tuple, list)):
        return bool(value) and all(isinstance(layer, (tuple, list)) and _has_states(layer, 1) for layer in value)
    if has_methods_of_a_cache(value):  # a module, in 4.46 to 4.48
        return True
    if isinstance(value, (Mapping, torch.nn.Module, type)) or hasattr(value, "__torch_function__"):
        return False
    return _has_states(getattr(value, "__dict__", {}), 4)  # xLSTM's is in an attribute, a dict of layers and a tuple


def has_methods_of_a_cache(value: object) -> bool:
    return callable(getattr(value, "update", None)) and callable(getattr(value, "get_seq_length", None))


def has_paged(call: Call) -> bool:
    # The blocks of generate_batch's cache hold the tokens of several requests.
    for value in call.values():
        if value is None or isinstance(value, _PLAIN):
            continue
        if callable(getattr(value, "update", None)) and callable(getattr(value, "free_blocks", None)):
            return True
    return False


def taken_by(forward: Function) -> list[str]:
    # A parameter that takes a cache is recognised by its annotation: a class that is neither a tensor nor a container
    # of torch or Python.
    function, found = inspect.unwrap(forward), []
    for each in inspecting.parameters(function):
        optional = each.default is None and each.annotation is not each.empty  # a cache is, everywhere
        if each.name in _OLD_NAMES or (optional and any(map(_is_class_of_caches, _classes(each.annotation, function)))):
            found.append(each.name)
    return found


def _classes(annotation: Any, function: Function) -> Iterator[type]:
    # Optional and Union are looked into.
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, sys.modules[function.__module__].__dict__)
        except Exception:  # a name that only type checkers import
            return
    arguments = typing.get_args(annotation)
    if isinstance(annotation, type) and not arguments:
        yield annotation
    for each in arguments:
        yield from _classes(each, function)


def _is_class_of_caches(cls: type) -> bool:
    if has_methods_of_a_cache(cls):
        return True
    own = cls.__module__.partition(".")[0] not in ("torch", "builtins", "typing", "types", "collections", "numpy")
    return own and not issubclass(cls, (torch.Tensor, Mapping, tuple, list, torch.nn.Module, Enum))


def _has_states(value: object, depth: int) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_floating_point() and value.dim() > 1
    if depth == 0:
        return False
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return any(_has_states(each, depth - 1) for each in inside)
