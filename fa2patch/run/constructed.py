"""Calls a function with each object of a class, and of its subclasses, once its constructor has returned."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from typing import Any, Callable

from .._types import Function
from ..binding import ABSENT, bind


class Constructed:
    """The replaced constructors of a class and of its subclasses, those that are defined later included.

    Args:
        base: The class.
        then: What is called with an object after each replaced constructor, and whether that was the outermost one.
            The constructor of a subclass goes on after that of its base.
        user: What the replacements belong to, as for :func:`fa2patch.binding.bind`.

    Attributes:
        under_way: The number of objects that this thread constructs, as ``under_way.objects``.
    """

    def __init__(self, base: Any, then: Callable[[Any, bool], None], user: Any) -> None:
        self._base, self._then, self._user = base, then, user
        self.under_way = _UnderWay()
        bind(base, "__init_subclass__", self._following, user)
        for cls in _with_subclasses(base):
            self._watch(cls)

    def _watch(self, cls: Any) -> None:
        if "__init__" in vars(cls):
            bind(cls, "__init__", self._reporting, self._user)

    def _following(self, original: Any) -> Any:
        def __init_subclass__(cls: Any, /, **kwargs: Any) -> None:
            if original is ABSENT:
                super(self._base, cls).__init_subclass__(**kwargs)
            else:
                original.__get__(None, cls)(**kwargs)
            self._watch(cls)

        return classmethod(__init_subclass__)

    def _reporting(self, original: Function) -> Function:
        @functools.wraps(original)
        def __init__(made: Any, *args: Any, **kwargs: Any) -> None:
            outermost = id(made) not in self.under_way.objects
            self.under_way.objects.add(id(made))
            try:
                original(made, *args, **kwargs)
            finally:
                if outermost:
                    self.under_way.objects.discard(id(made))
            self._then(made, outermost)

        return __init__


class _UnderWay(threading.local):
    """The ids of the objects that a thread constructs."""

    def __init__(self) -> None:
        self.objects: set[int] = set()


def _with_subclasses(cls: Any) -> Iterator[Any]:
    yield cls
    for subclass in cls.__subclasses__():
        yield from _with_subclasses(subclass)
