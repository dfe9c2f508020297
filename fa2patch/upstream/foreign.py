"""A forward that somebody else has put in the place of ours, on the class or on the object.

Liger, cut-cross-entropy and some trainers do so. What they do with a packed batch's labels is not known, so the batch
is seen to before it gets to them: in a forward pre-hook (``hooks.py``), which ``model(...)`` runs whatever ``forward``
is. ``model.forward(...)`` runs no hook. PEFT calls it so; then the base model refuses the batch.
"""

from __future__ import annotations

import functools
import inspect
import sys
from types import CodeType, MethodType
from typing import Any, Callable

from .._compile import compiling, constant
from ..documents.names import LABELS
from ..errors import PackingNotIsolated
from .calls import Calls

HOOKED = "_old_forward"
"""Where accelerate's hooks (``device_map``, offloading) keep the bound ``forward`` that they call."""

_ours: set[CodeType] = set()


def ours(forward: Callable[..., Any]) -> None:
    """Note that this function is one of ours (its code: a decorator of somebody's copies attributes)."""
    _ours.add(forward.__code__)


def on_top(module: Any) -> bool:
    """Whether ``module.forward`` is our function, and nobody's who may not call it."""
    own = module.__dict__.get("forward")
    if own is None:
        return _class_has_ours(type(module))
    return getattr(module.__dict__.get(HOOKED, own), "__code__", None) in _ours


@constant
def _class_has_ours(cls: type) -> bool:
    forward: Any = getattr(cls, "forward")  # noqa: B009 (mypy does not know the attribute)
    return getattr(forward, "__code__", None) in _ours


def replaced_on(model: Any) -> bool:
    """Whether somebody has put a forward of their own on the object (accelerate's hooks call the class's, and ours)."""
    own = model.__dict__.get("forward")
    return own is not None and HOOKED not in model.__dict__ and getattr(own, "__code__", None) not in _ours


def entered_first(model: Any, entered: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """A forward for the object that is ours, and goes on in the one that was put there."""
    own = model.__dict__["forward"]
    bound_here = getattr(own, "__self__", None) is model
    return MethodType(entered(own.__func__ if bound_here else _as_method(own)), model)


def _as_method(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    signature = inspect.signature(function)
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    named = [p.replace(kind=p.KEYWORD_ONLY) if p.name == "self" else p for p in signature.parameters.values()]
    setattr(forward, "__signature__", signature.replace(parameters=[first, *named]))  # noqa: B010 (unknown to mypy)
    return forward


def calls_of(module: Any) -> Calls:
    """The arguments of the forward that ``module`` has now; not remembered, which would keep that forward alive."""
    forward = module.forward
    return Calls(getattr(forward, "__func__", forward), hasattr(forward, "__func__"))


def on_top_of_ours(model: Any) -> Any:
    """The foreign forward that ``model`` has, or None where it has ours."""
    return None if on_top(model) else model.forward


def refuse_bypassed(model: Any, forward: Any) -> None:
    """Raise :class:`PackingNotIsolated` where a foreign forward of the model around has handed a packed batch on.

    No hook has run for it, so its labels may cross documents. A base model that is called by itself has no labels.
    """
    function = getattr(forward, "__func__", forward)
    if not compiling() and not _has_labels(getattr(function, "__code__", None)):
        return
    raise PackingNotIsolated(
        f"the forward of this {type(model).__name__} was replaced after fa2patch.apply, by "
        f"{getattr(function, '__module__', type(function).__name__)}.{getattr(function, '__qualname__', '')}, and was "
        "called as model.forward(...), past fa2patch: the labels of its packed batch would cross documents. Call "
        "fa2patch.apply(model) again, after what replaces the forward."
    )


def _has_labels(code: CodeType | None) -> bool:
    """Whether code that runs now, further out in this thread, was handed labels."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            held = {**frame.f_locals, **(frame.f_locals.get("kwargs") or {})}
            return any(held.get(name) is not None for name in LABELS)
        frame = frame.f_back  # type: ignore[assignment]
    return False
