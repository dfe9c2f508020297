"""Replaces one attribute and undoes the replacement. Apart from :mod:`fa2patch.run`, only this module imports wrapt.

What is installed is a plain function and never one of wrapt's wrappers, because torch.compile traces through a wrapt
FunctionWrapper to the original code (rule 5 of CONTRIBUTING.md). A binding is shared by all models that need it, holds
them weakly and is undone with the last of them. If other code has replaced the attribute again by then, its replacement
stays and the binding below it has no effect. The binding is removed as soon as that replacement is gone.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from types import ModuleType
from typing import Any, Callable

from ._torch import between_compilations

ABSENT = object()
"""Stands for the original value if the owner did not have the attribute."""

LOCK = threading.RLock()
_bindings: list[Binding] = []
_waiting: dict[tuple[str, Callable[[ModuleType, Any], None]], weakref.WeakSet[Any]] = {}


class Binding:
    """The replacement of ``owner.attribute`` by ``make(original)``, applied when it is created.

    Attributes:
        owner: a class, a module or any other object.
        original: the owner's own value before, or :data:`ABSENT`.
        replacement: the installed value; a ``staticmethod`` if the original is one.
        users: the patches that need this binding, held weakly.
        waited_for: ``id`` of the foreign replacement on top whose end :meth:`undo` waits for, else 0.
    """

    def __init__(self, owner: Any, attribute: str, make: Callable[[Any], Any]) -> None:
        self.owner, self.attribute = owner, attribute
        self.original = vars(owner).get(attribute, ABSENT)
        static = isinstance(self.original, staticmethod)
        made = make(self.original.__func__ if static else self.original)
        self.replacement = staticmethod(made) if static else made
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        self.waited_for = 0
        setattr(owner, attribute, self.replacement)

    @property
    def state(self) -> str:
        """``"applied"``, or ``"covered"`` if other code has replaced the attribute since; checked on each access."""
        return "applied" if vars(self.owner).get(self.attribute) is self.replacement else "covered"

    def undo(self) -> bool:
        """Put the original back and return True.

        If another replacement is on top, the binding waits until that is gone and this returns False.
        """
        if self.state == "covered":
            on_top = vars(self.owner).get(self.attribute, ABSENT)
            if on_top is self.original:
                return True  # an earlier patch has restored the original already
            if id(on_top) != self.waited_for:
                with contextlib.suppress(TypeError):  # a value without weak references cannot be waited for
                    weakref.finalize(on_top, _undo_unused).atexit = False
                    self.waited_for = id(on_top)
            return False
        if self.original is ABSENT:
            delattr(self.owner, self.attribute)
        else:
            setattr(self.owner, self.attribute, self.original)
        return True


def bind(owner: Any, attribute: str, make: Callable[[Any], Any], user: Any) -> Binding:
    """Add a user to the binding of this attribute. A new binding is applied if there is none, or it is covered."""
    with LOCK:
        if not used_by(user):
            weakref.finalize(user, _undo_unused).atexit = False
        for binding in reversed(_bindings):
            if binding.owner is owner and binding.attribute == attribute and binding.state == "applied":
                break
        else:
            binding = Binding(owner, attribute, make)
            _bindings.append(binding)
        binding.users.add(user)
        return binding


def release(user: Any) -> None:
    """Remove a user from every binding and undo the bindings that have no users left.

    While a graph is being compiled, in any thread, they are undone as soon as that is done.
    """
    with LOCK:
        for binding in _bindings:
            binding.users.discard(user)
        _undo_unused()


def when_imported(module: str, then: Callable[[ModuleType, Any], None], user: Any) -> None:
    """Call ``then`` with a module and a user: now, or once the module is imported if the user has bindings then.

    A user without bindings counts as gone, so it must have some before this is called.
    """
    with LOCK:
        if module in sys.modules:
            then(sys.modules[module], user)
            return
        import wrapt  # 15 modules, and only what is still to be imported needs them

        if (module, then) not in _waiting:
            _waiting[module, then] = weakref.WeakSet()
            wrapt.register_post_import_hook(functools.partial(_arrived, module, then), module)
        _waiting[module, then].add(user)


def _arrived(name: str, then: Callable[[ModuleType, Any], None], module: ModuleType) -> None:
    with LOCK:
        for user in _waiting.pop((name, then), ()):
            if used_by(user):
                then(module, user)


def used_by(user: Any) -> list[Binding]:
    """The bindings of one user, in the order in which they were made."""
    with LOCK:
        return [binding for binding in _bindings if user in binding.users]


def users() -> set[Any]:
    """Everything that uses a binding."""
    with LOCK:
        return {user for binding in _bindings for user in binding.users}


def _undo_unused() -> None:
    between_compilations(_undo)


def _undo() -> None:
    with LOCK:
        unused = [binding for binding in reversed(_bindings) if not list(binding.users)]
        for binding in unused:
            if binding in _bindings:  # a finalizer may run this function during the loop
                _bindings.remove(binding)
                if not binding.undo():
                    _bindings.append(binding)
