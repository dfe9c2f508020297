"""Foreign forwards: functions that other code has put in the place of our forward, on the class or on the object.

Liger, cut-cross-entropy and some trainers do so. It is not known what they do with the labels of a packed batch, so a
forward pre-hook (``hooks.py``) prepares the batch first. ``model(...)`` runs this hook with any ``forward``, but
``model.forward(...)`` does not. PEFT calls the model that way, and then the base model refuses the batch.
"""

from __future__ import annotations

import functools
import inspect
from types import CodeType, MethodType
from typing import Any, Callable

import torch

from .._torch import compiling, constant
from .._types import Call, Function, Model
from ..documents.names import LENGTHS, LOSS_LABELS, REAL
from ..errors import PackingNotIsolated
from . import inspecting
from .calls import Calls, passed

HOOKED = "_old_forward"
"""The attribute in which accelerate's hooks (``device_map``, offloading) keep the bound ``forward`` that they call."""

_ours: set[CodeType] = set()


def ours(forward: Function) -> None:
    """Register a function as ours by its code object, because foreign decorators copy function attributes."""
    _ours.add(forward.__code__)


def _is_ours(forward: object) -> bool:
    return inspecting.own_code(forward) in _ours


def on_top(module: object) -> bool:
    """Whether ``module.forward`` is our function, directly or below accelerate's hooks."""
    own = module.__dict__.get("forward")
    if own is None:
        return _class_has_ours(type(module))
    hooked = compiling() or _calls_hooked(own)  # else the forward was replaced above the hooks
    return _is_ours(module.__dict__.get(HOOKED, own) if hooked else own)


def looks_up_hooked(own: object) -> bool:
    """Whether a forward on an object looks up :data:`HOOKED` in each call. Those of accelerate 0.23 do not."""
    return HOOKED in getattr(inspecting.code_called(own), "co_names", ())


def _calls_hooked(own: object) -> bool:
    """Whether a forward on an object is one of accelerate's hooks. Those of 0.23 hold the forward that they call."""
    return looks_up_hooked(own) or "old_forward" in getattr(inspecting.code_called(own), "co_freevars", ())


@constant
def _class_has_ours(cls: Any) -> bool:
    return _is_ours(cls.forward)


def replaced_on(model: Model) -> bool:
    """Whether other code has put a forward on the object. Accelerate's hooks do not count, because they call ours."""
    own = model.__dict__.get("forward")
    return own is not None and not (HOOKED in model.__dict__ and _calls_hooked(own)) and not _is_ours(own)


def entered_first(model: Model, entered: Callable[[Function], Function]) -> MethodType:
    """Return a bound forward of ours that calls the foreign forward found on the object.

    Args:
        model: the object, with a foreign ``forward`` in its ``__dict__``.
        entered: makes our forward from an unbound one.
    """
    own = model.__dict__["forward"]
    bound_here = getattr(own, "__self__", None) is model
    return MethodType(entered(own.__func__ if bound_here else _as_method(own)), model)


def _as_method(function: Function) -> Function:
    @functools.wraps(function)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    first = inspect.Parameter("_model", inspect.Parameter.POSITIONAL_ONLY)  # a partial may have a parameter self
    inspecting.show_parameters(forward, [first, *inspecting.parameters(function)])
    return forward


def calls_of(module: torch.nn.Module) -> Calls:
    """Return the :class:`Calls` of the module's current forward. They are not cached: a cache would keep it alive."""
    forward = module.forward
    return Calls(getattr(forward, "__func__", forward), hasattr(forward, "__func__"))


def on_top_of_ours(model: Model) -> Function | None:
    """Return the model's foreign forward, or None if its forward is ours."""
    return None if on_top(model) else model.forward


def refuse_bypassed(model: Model, forward: Function) -> None:
    """Raise :class:`PackingNotIsolated` if a foreign forward that was called past the pre-hook has led here.

    What it does with labels is not known, nor whether it was given any. A base model that is called by itself is not
    refused, nor one that forwards of Transformers and accelerate hand their arguments on to. A graph shows no callers,
    so that every such batch is refused there.

    Args:
        model: the patched model.
        forward: its foreign forward.
    """
    function = getattr(forward, "__func__", forward)
    if not compiling():
        code = inspecting.code_called(function)
        led_here = code is None or any(frame.f_code is code for frame in inspecting.running())
        handed_on = (getattr(function, "__wrapped__", None), model.__dict__.get(HOOKED), *getattr(function, "args", ()))
        if not led_here or all(inspecting.is_known(each) for each in (function, *filter(callable, handed_on))):
            return
    raise PackingNotIsolated(
        f"the forward of this {type(model).__name__} was replaced after fa2patch.apply, by "
        f"{getattr(function, '__module__', type(function).__name__)}.{getattr(function, '__qualname__', '')}, and was "
        "called as model.forward(...), past fa2patch: the labels of its packed batch would cross documents. Call "
        "fa2patch.apply(model) again, after what replaces the forward."
    )


def explain_rejected(model: Any, call: Call, error: TypeError) -> None:
    """Raise :class:`PackingNotIsolated` if a foreign forward, called as ``model.forward(...)``, rejected an argument.

    Args:
        model: the patched model.
        call: arguments by name. Our forward takes all of ``LENGTHS`` and what the collators of fa2patch add.
        error: what the forward raised.
    """
    takes = calls_of(model).takes
    unknown = [name for name in passed(call, (*LENGTHS, REAL, LOSS_LABELS)) if not takes(name)]
    if unknown and not on_top(model):
        raise PackingNotIsolated(
            f"the forward of this {type(model).__name__} was replaced after fa2patch.apply by one that does not take "
            f"{unknown[0]}, and was called as model.forward(...), past fa2patch. Call fa2patch.apply(model) again, "
            "after what replaces the forward."
        ) from error
