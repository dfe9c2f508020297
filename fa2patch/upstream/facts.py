"""One attribute of Transformers that is replaced for a patched model."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Callable

from ..binding import bind
from .inspecting import defining


@dataclass(frozen=True)
class Site:
    """An attribute to replace, and the function that makes the replacement.

    A site pickles its owner by name, so that a patch can be bound again in another process.

    Attributes:
        owner: the class or module itself. A name would not do, because remote code that is loaded again defines another
            class of the same name.
        attribute: the attribute's name.
        make: a function that takes the original value and returns the replacement. It must be picklable.
    """

    owner: type | ModuleType
    attribute: str
    make: Callable[[Any], Any]

    @property
    def module(self) -> ModuleType:
        """The owner itself if it is a module, else the module that defines it."""
        if isinstance(self.owner, ModuleType):
            return self.owner
        return importlib.import_module(self.owner.__module__)

    def bind(self, user: object) -> None:
        """Replace the attribute on behalf of ``user``, for example a ``Patch``."""
        bind(self.owner, self.attribute, self.make, user)

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self.owner, ModuleType):
            return _site_of_module, (self.owner.__name__, self.attribute, self.make)
        return Site, (self.owner, self.attribute, self.make)


def _site_of_module(module: str, attribute: str, make: Callable[[Any], Any]) -> Site:
    return Site(importlib.import_module(module), attribute, make)


def of_forward(module: object, make: Callable[[Any], Any]) -> Site:
    """Return the site of a module's ``forward``, on the class that defines it."""
    return Site(defining(type(module), "forward"), "forward", make)
