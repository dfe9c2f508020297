"""What a model's modules and functions keep from one call to the next, as it is now, and how it is put back.

That is their attributes, and the containers, tensors, generators and closures that these hold; of code that nobody
knows also the objects and global names of its own file.
"""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Iterable, Iterator
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy
import torch

from .._types import Model
from ..comparison import version
from ..upstream import inspecting
from ..upstream.other_code import is_known, is_of_transformers
from .looking import HOOKS, WatchedHook, place, watched

# A module's hooks come and go while it runs.
_TABLES = frozenset(
    name for name in vars(torch.nn.Module()) if name.endswith(("_hooks", "_hooks_with_kwargs", "_called"))
)

_CONTAINERS = (dict, list, set, deque)
_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)


class _Names:
    """Some attributes of a class, or some global names of a file."""

    def __init__(self, home: Any, names: Iterable[str]) -> None:
        self.home, self.names = home, names


class State:
    """What modules keep now."""

    def __init__(
        self, modules: Iterable[torch.nn.Module], of_hooks: bool = False, read_by: frozenset[str] | None = None
    ) -> None:
        # ``of_hooks``: what hooks keep is put back, too. ``read_by``: global names and attributes. With them, the state
        # can only be compared, not put back, and of modules only these attributes count.
        self._of_hooks, self._read_by = of_hooks, read_by
        self._entered: dict[int, Any] = {}  # kept alive, so that no other object gets an id of these
        self._contents: list[tuple[Any, Any]] = []
        waiting: list[Any] = [*modules]
        self._tables = [
            (vars(each)[name], {*vars(each)[name]}) for each in waiting for name in HOOKS if name in vars(each)
        ]
        self._homes = {type(each).__module__ for each in waiting if _is_unknown(each)}
        while waiting:
            value = waiting.pop()
            if type(value) in _PLAIN or id(value) in self._entered:
                continue
            self._entered[id(value)] = value
            waiting += [*self._inside(value)][::-1]  # the first of them is looked at first

    def has_changed(self) -> bool:
        return any(not _same(value, self._content(value), content) for value, content in self._contents)

    def put_back(self) -> None:
        for table, keys in self._tables:  # 5.x adds hooks in a module's first call, and keeps that it has
            for key in table.keys() - keys:
                if is_of_transformers(table[key]):
                    del table[key]
        for value, content in self._contents:
            if not _same(value, self._content(value), content):
                _put(value, content)

    def _hold(self, value: Any) -> Any:
        content = self._content(value)
        if isinstance(value, torch.Tensor) and self._read_by is None:
            content = (*content, value.detach().clone())
        self._contents.append((value, content))
        return content

    def _content(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return version(value), place(value)
        if isinstance(value, torch.nn.Module):
            held = vars(value)
            read = self._read_by
            return {name: held[name] for name in held if name not in _TABLES and (read is None or name in read)}
        if isinstance(value, _Names):
            held = value.home if isinstance(value.home, dict) else vars(value.home)
            return {name: held[name] for name in value.names if name in held}
        if isinstance(value, CellType):
            return () if value == CellType() else (value.cell_contents,)
        if isinstance(value, torch.Generator):
            return value.get_state()
        if isinstance(value, numpy.ndarray):
            return value.copy()
        return dict(value) if isinstance(value, dict) else set(value) if isinstance(value, set) else list(value)

    def _inside(self, value: Any) -> Iterator[Any]:
        # The content of what may change is kept.
        if isinstance(value, torch.nn.Module):
            yield from () if inspecting.is_scripted(value) else self._of_module(value)
        elif isinstance(value, torch.nn.Parameter) or (isinstance(value, torch.Tensor) and value.device.type == "meta"):
            return
        elif isinstance(value, (torch.Tensor, torch.Generator, numpy.ndarray)):
            self._hold(value)
        elif isinstance(value, (*_CONTAINERS, CellType)):
            held = self._hold(value)
            yield from held.values() if isinstance(held, dict) else held
        elif isinstance(value, tuple):
            yield from value
        elif callable(value):
            yield from self._of_callable(value)
        own = type(value).__module__ in self._homes and hasattr(value, "__dict__")
        if own and not isinstance(value, torch.nn.Module):
            yield from (vars(value), type(value))

    def _of_module(self, module: torch.nn.Module) -> Iterator[Any]:
        yield from self._hold(module).values()
        hooks = [hook for table in HOOKS for hook in vars(module).get(table, {}).values()] if self._of_hooks else []
        if any(isinstance(hook, WatchedHook) and hook.changes for hook in hooks):  # perhaps the weights
            for parameter in module.parameters(recurse=False):
                self._hold(parameter)
        yield from hooks
        yield from [type(module)] if _is_unknown(module) else ()

    def _of_callable(self, value: Any) -> Iterator[Any]:
        if isinstance(value, WatchedHook):
            yield value.function
        elif isinstance(value, functools.partial):
            yield from (value.func, value.args, value.keywords)
        elif isinstance(value, MethodType) and not is_known(value.__func__):
            yield from (value.__func__, value.__self__)
        elif isinstance(value, FunctionType) and not is_known(value):
            self._homes.add(value.__module__)
            yield from (*(value.__closure__ or ()), value.__defaults__ or (), vars(value))
            yield from self._hold(_Names(value.__globals__, inspecting.names_within(value))).values()
        elif isinstance(value, type) and value.__module__ in self._homes:
            yield from (*(each for each in vars(value).values() if isinstance(each, FunctionType)), *value.__bases__)
            own = [name for name, each in vars(value).items() if type(each) in (*_PLAIN, *_CONTAINERS)]
            yield from self._hold(_Names(value, [name for name in own if not name.startswith("__")])).values()


def names_of(model: Model) -> frozenset[str]:
    classes = {cls for module in model.modules() if _is_unknown(module) for cls in type(module).__mro__}
    functions = [each for cls in classes for each in vars(cls).values() if isinstance(each, FunctionType)]
    held = [each for module in model.modules() for each in vars(module).values() if callable(each)]
    hooks = [hook.function for hook in watched(model) if hook.changes]
    unknown = [each for each in (*functions, *held, *hooks) if not is_known(each)]
    return frozenset(name for each in unknown for name in inspecting.words_within(each))


def _is_unknown(module: torch.nn.Module) -> bool:
    return not inspecting.is_scripted(module) and not is_known(type(module).forward)


def _same(value: Any, now: Any, before: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return bool(now == before[:2])
    if isinstance(value, torch.Generator):
        return bool(torch.equal(now, before))
    if isinstance(value, numpy.ndarray):
        return bool(now.tobytes() == before.tobytes())
    if isinstance(now, set):
        return bool(now == before)
    if isinstance(now, dict):  # in the same order
        return list(now) == list(before) and _same(None, [*now.values()], [*before.values()])
    return len(now) == len(before) and all(map(operator.is_, now, before))


def _put(value: Any, content: Any) -> None:
    if isinstance(value, torch.Tensor):
        with torch.inference_mode() if value.is_inference() else torch.no_grad():
            value.copy_(content[2])
    elif isinstance(value, torch.nn.Module):
        held = vars(value)
        tables = {name: held[name] for name in _TABLES if name in held}
        held.clear()
        held.update({**content, **tables})
    elif isinstance(value, _Names):
        for name, each in content.items():
            value.home.__setitem__(name, each) if isinstance(value.home, dict) else setattr(value.home, name, each)
    elif isinstance(value, CellType):
        value.cell_contents = content[0]
    elif isinstance(value, torch.Generator):
        value.set_state(content)
    elif isinstance(value, numpy.ndarray):
        value[...] = content
    elif isinstance(value, (list, deque)):
        value.clear()
        value.extend(content)
    else:
        value.clear()
        value.update(content)
