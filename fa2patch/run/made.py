"""Patches the models that class methods of ``PreTrainedModel`` return to the program.

``from_pretrained`` and ``from_config`` end in two methods of PreTrainedModel, which are replaced. Constructors are not,
because their end cannot be seen from outside: a base model's last step runs inside the causal LM's constructor, a
subclass adds modules after it, and loading constructs models without weights. A model made by calling its class is
patched when it is given to a ``Trainer``, or when a Trainer's ``model_init`` returns it.
"""

from __future__ import annotations

import functools
import sys
import threading
import traceback
from typing import Any

from .._types import Function
from ..binding import bind
from .constructed import Constructed
from .meeting import Meeting


class _Depth(threading.local):
    """The number of nested calls of this thread that make a model. Only the outermost returns it to the program."""

    calls = 0


class MadeModels:
    """The replaced class methods.

    Attributes:
        inside: What constructs objects that hold a model. A model made inside such a constructor is not met by itself.
    """

    def __init__(self, meeting: Meeting) -> None:
        self.inside: list[Constructed] = []
        self._meeting, self._depth = meeting, _Depth()

    def watch(self, base: Any) -> None:
        """Replace the methods of ``PreTrainedModel`` that make models."""
        self._base = base
        for name in ("from_pretrained", "_from_config"):
            bind(base, name, self._making, self._meeting)

    def _making(self, original: classmethod[Any, Any, Any]) -> classmethod[Any, Any, Any]:
        make: Function = original.__func__

        @functools.wraps(make)
        def watched(cls: Any, *args: Any, **kwargs: Any) -> Any:
            self._depth.calls += 1
            try:
                made = make(cls, *args, **kwargs)
            finally:
                self._depth.calls -= 1
            model = made[0] if isinstance(made, tuple) else made  # a tuple: output_loading_info=True
            if self._meeting.active and isinstance(model, self._base) and self._is_whole():
                self._meeting.meet(model)
            return made

        return classmethod(watched)

    def _is_whole(self) -> bool:
        """Whether the program gets the model, and not a constructor that makes it a part, as a vision tower is."""
        if self._depth.calls or any(holders.under_way.objects for holders in self.inside):
            return False
        return not any(
            frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), self._base)
            for frame, _ in traceback.walk_stack(sys._getframe(2))
        )
