"""Hooks that only look: they need no proof, and no proof calls them.

A hook that nobody knows is watched in every forward and backward that runs anyway. As long as it returns nothing and
changes nothing, it has no effect. With the first call that changes something, the batch is proven before its use.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Any

import torch

from .._torch import compiling, transforming, unobserved
from .._types import Model
from ..binding import users
from ..comparison import tensors, version
from ..upstream import inspecting
from ..upstream.embeddings import ByDocument
from ..upstream.find_models import embedding_of, named_modules
from ..upstream.other_code import is_known

HOOKS = {
    "_forward_pre_hooks": "a forward pre-hook",
    "_forward_hooks": "a forward hook",
    "_backward_pre_hooks": "a backward pre-hook",
    "_backward_hooks": "a backward hook",
}

# Torch's hooks of all modules.
EVERYWHERE = tuple((what, getattr(torch.nn.modules.module, f"_global{table}")) for table, what in HOOKS.items())

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Thread(threading.local):
    # What a proof does with hooks that have only looked: it leaves them out (False), or calls them all the same (True).
    # It is None without a proof.
    calls: bool | None = None
    # Takes the state that unknown code reads, while a batch runs that was proven without these hooks; else None.
    read: Callable[[], Any] | None = None


thread = _Thread()


@contextlib.contextmanager
def called(calls: bool | None) -> Iterator[None]:
    # This sets _Thread.calls for hooks that have only looked.
    before, thread.calls = thread.calls, calls
    try:
        yield
    finally:
        thread.calls = before


class WatchedHook:
    """A hook that is watched. It stands in the hook's place in a table of hooks."""

    def __init__(self, function: Any, module: Any = None, by: WatchedHook | None = None) -> None:
        # Of a hook of a tensor that a module's hook has registered, ``module`` is the module and ``by`` that module's
        # hook.
        self.function, self.module, self.by = function, module, by
        # ``changes``: it has returned something, or changed something in place. ``feeds``: it has changed what unknown
        # code reads, and that is then not a replica's.
        self.changes, self.feeds, self.times = False, False, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        known = self.changes and (self.feeds or thread.read is None)
        if known or compiling() or transforming() or thread.calls:
            return self.function(*args, **kwargs)
        if thread.calls is not None:
            return None
        module = args[0] if self.module is None else self.module
        self.times += 1
        before = _Given(module, (args, kwargs), values=self.times & (self.times - 1) == 0)
        read = None if thread.read is None else thread.read()
        output = self.function(*args, **kwargs)
        feeds = read is not None and read.has_changed()
        changed = output is not None or before.has_changed() or "grad_fn" in inspecting.names_within(self.function)
        if feeds or (changed and not self.changes):  # nothing shows hooks of a tensor's grad_fn
            self.changes, self.feeds = True, self.feeds or feeds
            if self.by is not None:
                self.by.changes = True
            for user in () if is_known(self.function) else users():
                if hasattr(user, "hook_changes") and module in user.model.modules():
                    user.hook_changes()
        elif self.by is None:
            before.watch_tensors(self)
        return output


class _Given:
    """What a hook was given, as it is now: tensors, and what the module's code reads of the module."""

    def __init__(self, module: torch.nn.Module, given: Any, values: bool) -> None:
        # ``values`` are compared, too, because some ways to change a tensor leave its version as it was (``.data``).
        self.module, self.given, self.values = module, given, values
        self.tensors = self._tensors()
        self.prints = self._prints()
        self.attributes = dict(vars(module))
        with unobserved():
            self.hooked = [set(_hooks_of(each)) for each in self.tensors]

    def _tensors(self) -> list[torch.Tensor]:
        own = vars(self.module)
        held = [*own["_parameters"].values(), *own["_buffers"].values()]
        if self.values:
            held = [*self.module.parameters(), *self.module.buffers()]
        return [each for each in (*tensors(self.given), *held) if each is not None]

    def _prints(self) -> list[Any]:
        with unobserved(), torch.no_grad():
            found: list[Any] = [(version(each), place(each)) for each in self.tensors]
            if not self.values:
                return found
            below = {id(each) for child in self.module.children() for each in child.parameters()}  # may be many
            return found + [_sums(each) for each in self.tensors if id(each) not in below]

    def has_changed(self) -> bool:
        if len(now := self._tensors()) != len(self.tensors) or any(a is not b for a, b in zip(now, self.tensors)):
            return True
        if self._prints() != self.prints:
            return True
        held, missing = vars(self.module), object()
        names = {name for name in {*held, *self.attributes} if held.get(name, missing) is not self.attributes.get(name)}
        if not names:
            return False
        bases = takewhile(lambda base: base is not torch.nn.Module, type(self.module).__mro__)
        functions = (value for base in bases for value in vars(base).values() if callable(value))
        return any(names & inspecting.words_within(each) for each in functions)

    def watch_tensors(self, by: WatchedHook) -> None:
        with unobserved():
            for one, before in zip(self.tensors, self.hooked):
                for key in {*_hooks_of(one)} - before:
                    hooks = _hooks_of(one)
                    if not is_known(hooks[key]):
                        hooks[key] = WatchedHook(hooks[key], self.module, by)


def place(values: torch.Tensor) -> int:
    # 0 if it cannot be said where the values are.
    plain = type(values) in (torch.Tensor, torch.nn.Parameter) and values.layout == torch.strided
    return values.data_ptr() if plain and values.device.type != "meta" else 0


def _sums(values: torch.Tensor) -> Any:
    # The bits of each vector are added up, so that nothing as large as the tensor is made.
    if not place(values) or values.is_complex():
        return None
    bits = values.detach().view(_BITS[values.element_size()]) if values.is_floating_point() else values.detach()
    return (bits.sum(-1) if bits.dim() else bits).tolist()


def _hooks_of(tensor: torch.Tensor) -> Any:
    return tensor._backward_hooks or {}


def _tables(model: Model) -> Iterator[Any]:
    held = (vars(module) for module in named_modules(model).values())
    yield from (each[name] for each in held for name in HOOKS if each.get(name))
    yield from (table for _, table in EVERYWHERE)


def _is_of_all(table: Any) -> bool:
    return any(table is each for _, each in EVERYWHERE)


def watch(model: Model) -> None:
    # Hooks of all modules are watched even if they are known, as torch's are.
    noisy = getattr(embedding_of(model), "_forward_hooks", None)  # such hooks are called for each document
    for table in _tables(model):
        for key, hook in list(table.items()):
            if isinstance(hook, (WatchedHook, ByDocument)) or (is_known(hook) and not _is_of_all(table)):
                continue
            if table is not noisy or not inspecting.draws(hook):
                table[key] = WatchedHook(hook)


def watched(model: Model) -> list[WatchedHook]:
    return [hook for table in _tables(model) for hook in table.values() if isinstance(hook, WatchedHook)]


def release(model: Model, everywhere: bool) -> None:
    for table in _tables(model):
        for key, hook in list(table.items()):
            if isinstance(hook, WatchedHook) and (everywhere or not _is_of_all(table)):
                table[key] = hook.function


def has_only_looked(hook: Any) -> bool:
    # A hook that is not watched yet will be, before it is called.
    return not (
        hook.changes if isinstance(hook, WatchedHook) else isinstance(hook, ByDocument) or inspecting.draws(hook)
    )
