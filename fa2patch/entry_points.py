"""Traits and kernels that other installed packages add through entry points.

An entry point of the group ``fa2patch.traits`` or ``fa2patch.kernels`` names a function without arguments, which calls
``fa2patch.traits.register_trait`` or ``fa2patch.kernels.register_kernel``. The first ``apply``, or the first command
that lists kernels, calls each of them once. ``import fa2patch`` calls none.
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
    """What a package has added."""  # a data class without a docstring makes one of its signature, in 130 calls

    kind: str  # "trait" or "kernel"
    name: str
    package: str  # with its version


# It is held while something is added, and reentrant because that may add more.
LOCK = threading.RLock()

_added: list[Added] = []
_under_way: list[str] = []
_done: set[str] = set()


def load() -> None:
    # An entry point that fails is left out with a warning: a broken package that nobody asked for here must not keep a
    # model from training.
    with LOCK:  # another thread's model must not be planned without a trait that is still to be added
        if _done:
            return
        _done.update(GROUPS)
        found: Any = metadata.entry_points()
        for group in GROUPS:
            # a dict in Python 3.9
            entries = found.select(group=group) if hasattr(found, "select") else found.get(group, ())
            for entry in sorted(entries, key=lambda entry: (entry.name, entry.value)):
                _load(entry, group)


def added() -> tuple[Added, ...]:
    return tuple(_added)


def note(kind: str, name: str) -> None:
    # Only what an entry point registers is recorded, not what a program registers itself.
    if _under_way:
        _added.append(Added(kind, name, _under_way[-1]))


def _load(entry: Any, group: str) -> None:
    owner = getattr(entry, "dist", None)  # Python 3.9 does not say
    package = f"{owner.metadata['Name']} {owner.version}" if owner is not None else entry.value.partition(":")[0]
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
