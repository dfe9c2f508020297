"""Traits and kernels that other installed packages add through entry points.

An entry point of the group ``fa2patch.traits`` or ``fa2patch.kernels`` names a function without arguments, which calls
``fa2patch.traits.register_trait`` or ``fa2patch.kernels.register_kernel``. Each is called once in a process, by the
first ``apply`` or the first command that lists kernels, and never by ``import fa2patch``.
"""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass
from importlib import metadata
from typing import Any

GROUPS = ("fa2patch.traits", "fa2patch.kernels")


@dataclass(frozen=True)
class Added:
    """What a package has added: a ``"trait"`` or a ``"kernel"``, its name, and the package with its version."""

    kind: str
    name: str
    package: str


LOCK = threading.RLock()
"""Held while something is added, which may add more."""

_added: list[Added] = []
_under_way: list[str] = []
_done: set[str] = set()


def load() -> None:
    """Call the functions of all entry points, once in a process.

    One that fails is left out with a RuntimeWarning, which names it and its package: a package that is broken, and that
    nobody asked for here, must not keep a model from training.
    """
    with LOCK:  # another thread's model must not be planned without a trait that is still to be added
        if _done:
            return
        _done.update(GROUPS)
        for group in GROUPS:
            for entry in _entry_points(group):
                _load(entry, group)


def added() -> tuple[Added, ...]:
    """What other packages have added so far, in order."""
    return tuple(_added)


def note(kind: str, name: str) -> None:
    """Record what is registered while an entry point is loaded. What a program registers itself is not recorded."""
    if _under_way:
        _added.append(Added(kind, name, _under_way[-1]))


def _entry_points(group: str) -> list[Any]:
    found: Any = metadata.entry_points()
    chosen = found.select(group=group) if hasattr(found, "select") else found.get(group, ())  # a dict in Python 3.9
    return sorted(chosen, key=lambda entry: (entry.name, entry.value))


def _load(entry: Any, group: str) -> None:
    package = _package_of(entry)
    _under_way.append(package)
    try:
        entry.load()()
    except Exception as error:
        warnings.warn(
            f"the entry point {entry.name!r} of {group}, {entry.value!r} of {package}, failed and is left out. "
            "Expected a function without arguments that registers a trait or a kernel, found "
            f"{type(error).__name__}: {error}. Update or uninstall {package}.",
            RuntimeWarning,
            stacklevel=2,
        )
    finally:
        _under_way.pop()


def _package_of(entry: Any) -> str:
    owner = getattr(entry, "dist", None)  # Python 3.9 does not say
    return f"{owner.metadata['Name']} {owner.version}" if owner is not None else entry.value.partition(":")[0]
