"""Replaces one attribute and undoes the replacement. Apart from :mod:`fa2patch.run`, only this module imports wrapt.

What is installed is a plain function and never one of wrapt's wrappers, because torch.compile traces through a wrapt
FunctionWrapper to the original code (rule 5 of CONTRIBUTING.md). A binding is shared by all models that need it, holds
them weakly and is undone with the last of them. If other code has replaced the attribute again by then, its replacement
stays and the binding below it has no effect. The binding is removed as soon as that replacement is gone.

The collector may run a finalizer between any two lines, in any thread. So a finalizer changes nothing here and waits
for nothing: it says that something is due, and that is done when nobody is :func:`changing` bindings. For the same
reason users are held in sets of plain weak references, which no callback changes, and not in a WeakSet.
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

ABSENT = object()
"""Stands for the original value if the owner did not have the attribute."""

Users = set[weakref.ref[Any]]

_lock: Any = threading.RLock()
_due = False
_bindings: list[Binding] = []
_waiting: dict[tuple[str, Callable[[ModuleType, Any], None]], Users] = {}


@contextlib.contextmanager
def changing(waits: bool = False) -> Iterator[None]:
    """Inside this context no other thread changes a binding, and no finalizer does. What is due is done at its end.

    Contexts may be nested. While a graph is being compiled, in any thread, it is done as soon as that is over.

    Args:
        waits: whether no other thread may compile meanwhile, as where a model is patched. A thread that compiles may
            change bindings, so this must not be asked for inside another context that has not waited.
    """
    try:
        with no_compilation() if waits else contextlib.nullcontext(), _lock:
            yield
    finally:
        _settle()


class Binding:
    """The replacement of ``owner.attribute`` by ``make(original)``.

    Attributes:
        owner: a class, a module or any other object.
        original: the owner's own value before, or :data:`ABSENT`.
        replacement: the installed value; a ``staticmethod`` if the original is one.
        users: the patches that need this binding, held weakly.
        waited_for: the foreign replacement on top whose end :meth:`undo` waits for, held weakly; else None.
    """

    def __init__(self, owner: Any, attribute: str, make: Callable[[Any], Any], user: Any) -> None:
        self.owner, self.attribute = owner, attribute
        self.users: Users = {weakref.ref(user)}
        self.waited_for: weakref.ref[Any] | None = None
        self.original = vars(owner).get(attribute, ABSENT)
        static = isinstance(self.original, staticmethod)
        made = make(self.original.__func__ if static else self.original)
        self.replacement = staticmethod(made) if static else made

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
    """Add a user to the binding of this attribute. A new binding is applied if there is none, or it is covered."""
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
    """Remove a user from every binding. Those that have no users left are undone at the end of :func:`changing`."""
    global _due
    with changing():
        for binding in _bindings:
            binding.users.discard(weakref.ref(user))
        _due = True


def when_imported(module: str, then: Callable[[ModuleType, Any], None], user: Any) -> None:
    """Call ``then`` with a module and a user: now, or once the module is imported if the user has bindings then.

    A user without bindings counts as gone, so it must have some before this is called.
    """
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
    """The bindings of one user, in the order in which they were made."""
    with changing():
        return [binding for binding in _bindings if weakref.ref(user) in binding.users]


def users() -> set[Any]:
    """Everything that uses a binding."""
    with changing():
        return {user for binding in _bindings for user in _alive(binding.users)}


def _alive(refs: Iterable[weakref.ref[Any]]) -> list[Any]:
    return [user for user in [each() for each in refs] if user is not None]


def _forgotten() -> None:
    """Finalizer of users, and of what covers a binding."""
    global _due
    if not _due:  # else whoever has said so, or holds the lock, does it
        _due = True
        _settle()


def _settle() -> None:
    if _due and not _lock._is_owned():
        between_compilations(_undo_unused)


def _undo_unused() -> None:
    """Undo bindings without users, again until nothing is due. Another thread that holds the lock will do it."""
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
