"""Replaces one attribute and undoes the replacement. Apart from :mod:`fa2patch.run`, only this module imports wrapt.

A binding is shared by all models that need it, holds them weakly and is undone with the last of them. If other code has
replaced the attribute again by then, its replacement stays, and the binding below it goes as soon as that one is gone.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any, Callable

from ._torch import between_compilations, no_compilation

ABSENT = object()  # the original value, if the owner did not have the attribute

Users = set[weakref.ref[Any]]  # not a WeakSet, which a finalizer's callback could change at any time

_lock: Any = threading.RLock()
# The collector may run a finalizer between any two lines, in any thread. So a finalizer changes no binding and waits
# for nothing: it sets this, and the work is done when nobody is changing bindings.
_due = False
_bindings: list[Binding] = []
_waiting: dict[tuple[str, Callable[[ModuleType, Any], None]], Users] = {}


@contextlib.contextmanager
def changing(waits: bool = False) -> Iterator[None]:
    # Inside this context no other thread and no finalizer changes a binding; with `waits`, no other thread compiles
    # either. A thread that compiles may change bindings, so `waits` must not be set inside another context that has not
    # waited: the two threads would wait for each other.
    try:
        with no_compilation() if waits else contextlib.nullcontext(), _lock:
            yield
    finally:
        _settle()


class Binding:
    """The replacement of ``owner.attribute`` by ``make(original)``."""

    def __init__(self, owner: Any, attribute: str, make: Callable[[Any], Any], user: Any) -> None:
        self.owner, self.attribute = owner, attribute
        self.users: Users = {weakref.ref(user)}
        # the foreign replacement on top, whose end `undo` waits for
        self.waited_for: weakref.ref[Any] | None = None
        self.original = vars(owner).get(attribute, ABSENT)
        static = isinstance(self.original, staticmethod)
        made = make(self.original.__func__ if static else self.original)
        # What is installed is a plain function and none of wrapt's wrappers: torch.compile traces through a wrapt
        # FunctionWrapper to the original code (rule 5 of CONTRIBUTING.md).
        self.replacement = staticmethod(made) if static else made

    @property
    def state(self) -> str:
        # A binding is covered if other code has replaced the attribute since.
        return "applied" if vars(self.owner).get(self.attribute) is self.replacement else "covered"

    def undo(self) -> bool:
        # The result is False while another replacement is on top, and the binding waits until that is gone.
        if self.state == "covered":
            on_top = vars(self.owner).get(self.attribute, ABSENT)
            if on_top is self.original:
                return True  # an earlier patch has restored the original already
            if self.waited_for is None or self.waited_for() is not on_top:
                with contextlib.suppress(TypeError):  # a value without weak references cannot be waited for
                    weakref.finalize(on_top, _forgotten).atexit = False
                    self.waited_for = weakref.ref(on_top)
            return False
        if self.original is ABSENT:
            delattr(self.owner, self.attribute)
        else:
            setattr(self.owner, self.attribute, self.original)
        return True


def bind(owner: Any, attribute: str, make: Callable[[Any], Any], user: Any) -> Binding:
    # A covered binding has no effect, so a new one is made on top of what covers it.
    with changing():
        if not used_by(user):
            weakref.finalize(user, _forgotten).atexit = False
        for binding in reversed(_bindings):
            if binding.owner is owner and binding.attribute == attribute and binding.state == "applied":
                binding.users.add(weakref.ref(user))
                return binding
        binding = Binding(owner, attribute, make, user)
        _bindings.append(binding)  # before it is applied: an interrupt between the two leaves nothing that is unknown
        setattr(owner, attribute, binding.replacement)
        return binding


def release(user: Any) -> None:
    # Bindings that have no users left are undone at the end of `changing`.
    global _due
    with changing():
        for binding in _bindings:
            binding.users.discard(weakref.ref(user))
        _due = True


def when_imported(module: str, then: Callable[[ModuleType, Any], None], user: Any) -> None:
    # This calls `then` now, or once the module is imported if the user has bindings then. A user without bindings
    # counts as gone, so it must have some before this is called.
    with changing():
        if module in sys.modules:
            then(sys.modules[module], user)
        if (module, then) in _waiting:  # if it is there already, another thread has imported half of it
            _waiting[module, then].add(weakref.ref(user))
        elif module not in sys.modules:
            import wrapt  # 15 modules, and only what is still to be imported needs them

            _waiting[module, then] = {weakref.ref(user)}
            wrapt.register_post_import_hook(functools.partial(_arrived, module, then), module)


def _arrived(name: str, then: Callable[[ModuleType, Any], None], module: ModuleType) -> None:
    with changing():
        for user in _alive(_waiting.pop((name, then), ())):
            if used_by(user):
                then(module, user)


def used_by(user: Any) -> list[Binding]:
    with changing():
        return [binding for binding in _bindings if weakref.ref(user) in binding.users]


def users() -> set[Any]:
    with changing():
        return {user for binding in _bindings for user in _alive(binding.users)}


def _alive(refs: Iterable[weakref.ref[Any]]) -> list[Any]:
    return [user for user in [each() for each in refs] if user is not None]


def _forgotten() -> None:
    # Users, and what covers a binding, have this finalizer.
    global _due
    if not _due:  # else whoever has said so, or holds the lock, does it
        _due = True
        _settle()


def _settle() -> None:
    if _due and not _lock._is_owned():
        between_compilations(_undo_unused)


def _undo_unused() -> None:
    # A thread that holds the lock undoes unused bindings itself, so no other thread waits for the lock.
    global _due
    while _due and not _lock._is_owned() and _lock.acquire(blocking=False):
        try:
            _due = False
            for refs in (*_waiting.values(), *(binding.users for binding in _bindings)):
                refs.difference_update([each for each in refs if each() is None])
            for binding in reversed(_bindings.copy()):
                if not binding.users and binding.undo():
                    _bindings.remove(binding)
        finally:
            _lock.release()
