"""Whether a model's modules, and the code that they run, are those that were last looked at."""

from __future__ import annotations

import sys
from itertools import repeat
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch

from .._types import Model
from ..upstream import forward, hooks, inspecting
from ..upstream.inspecting import below_ours
from .unknown import EVERYWHERE, HOOKS, replaceable

_OUR_HOOKS = (hooks.before, hooks.after, forward.runs)
_of_class, _code = attrgetter("forward", "__call__"), attrgetter("__code__")


class Structure:
    """A model's modules, their classes, hooks and functions, kept as they are now.

    Every packed batch asks :meth:`is_as_kept`, which compares lists in C: about 0.1 µs for a module, and no call of
    Python's for any. The modules are kept alive until the next look, so that no other object gets the id of one.

    Attributes:
        number: the result of :func:`number_of`, by which a look tells fa2patch's own changes from others.
    """

    def __init__(self, model: Model) -> None:
        modules: list[torch.nn.Module] = list(model.modules())
        held = [vars(module) for module in modules]
        kinds = [cls for cls in dict.fromkeys(map(type, modules)) if hasattr(cls, "forward")]  # TorchScript has none
        tables = [each["_modules"] for each in held]
        hooked = [each[name] for each in held for name in HOOKS if name in each] + [table for _, table in EVERYWHERE]
        names = [(vars(sys.modules[home]), name) for home, name in replaceable(kinds)]
        self.number = number_of(model)
        self._modules, self._classes = modules, list(map(type, modules))
        self._held, self._forwards = held, [each.get("forward") for each in held]
        self._empty = [table for table in (*tables, *hooked) if not table]
        self._tables = [table for table in (*tables, *hooked) if table]
        self._entries = [dict(table.items()) for table in self._tables]
        self._kinds, self._of_kinds = kinds, list(map(_of_class, kinds))
        self._spaces, self._names = [space for space, _ in names], [name for _, name in names]
        self._functions = [space.get(name) for space, name in names]
        inside = [*self._forwards, *self._functions, *(each for pair in self._of_kinds for each in pair)]
        inside += [entry for entries in self._entries for entry in entries.values()]
        self._with_code = [each for each in dict.fromkeys(map(_plain, inside)) if each is not None]
        self._codes = list(map(_code, self._with_code))

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled model is looked at again."""
        return type(None), ()

    def is_as_kept(self) -> bool:
        """Whether nothing has changed, neither by fa2patch nor by others. Nothing but C runs for a module."""
        return (
            not any(self._empty)
            and self._tables == self._entries
            and list(map(type, self._modules)) == self._classes
            and list(map(dict.get, self._held, repeat("forward"))) == self._forwards
            and list(map(_of_class, self._kinds)) == self._of_kinds
            and list(map(dict.get, self._spaces, self._names)) == self._functions
            and list(map(_code, self._with_code)) == self._codes
        )


def number_of(model: Model) -> int:
    """A number that changes when modules, their classes, the code that they run or its hooks change.

    That is forwards, calls of classes, functions that Transformers' files define for them, and hooks, those of all
    modules too. What fa2patch itself has put there does not count.
    """
    seen = [model]
    functions: list[Any] = []
    for module in seen:  # the list grows during the loop
        held = module.__dict__
        if "forward" in held:
            functions.append(held["forward"])
        for table in HOOKS:
            functions.extend(hook for hook in held.get(table, {}).values() if hook not in _OUR_HOOKS)
        if held["_modules"]:
            seen.extend(child for child in held["_modules"].values() if child is not None)
    classes: list[Any] = [*map(type, seen)]
    kinds = dict.fromkeys(classes)
    for cls in kinds:
        functions += (below_ours(getattr(cls, "forward", None)), cls.__call__)
    functions.extend(vars(sys.modules[home])[name] for home, name in replaceable(kinds))
    for _, table in EVERYWHERE:
        functions.extend(table.values())
    # ids of functions may come again; most functions have code themselves, and asking for it calls nothing
    codes = (id(getattr(each, "__code__", None) or inspecting.code_called(each)) for each in functions)
    return hash((tuple(map(id, seen)), tuple(map(id, classes)), tuple(map(id, functions)), tuple(codes)))


def _plain(function: Any) -> FunctionType | None:
    """The function that a method, or another object, holds; None if there is none with code of its own."""
    function = getattr(function, "__func__", function)
    return function if isinstance(function, FunctionType) else None
