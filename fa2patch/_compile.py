"""Marks and queries for torch.compile that do not import its compiler, which takes a second."""

from __future__ import annotations

import _thread
import contextlib
import itertools
import sys
import weakref
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any, Callable, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """Run ``function`` eagerly also inside a compiled model.

    Values that the function reads on the host must not become constants of the graph. This sets the mark that
    ``torch.compiler.disable`` sets (torch/_dynamo/eval_frame.py).
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def constant(function: F) -> F:
    """Call ``function`` while a graph is captured; its return value becomes a constant of the graph.

    This sets the mark that ``torch._dynamo.assume_constant_result`` sets (torch/_dynamo/decorators.py).
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


_numbers = itertools.count(1)
_numbered: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def number(held: Any) -> str:
    """Give an object a new number, with which a ``constant`` function of a graph gets it from :func:`numbered`.

    A graph that was captured with an older number of the object is captured again. The number is a text, because dynamo
    may make an int that differs between models a symbol of the graph, which is no argument of such a function. The
    object is not kept alive.
    """
    given = str(next(_numbers))
    _numbered[given] = held
    return given


def numbered(given: str) -> Any:
    """The object that has a number."""
    return _numbered[given]


_paused = False
_CAN_TELL = hasattr(torch.compiler, "is_compiling")


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Make :func:`compiling` return False inside the block.

    A function that is called during a capture, but not captured, uses this to run models eagerly:
    ``torch.compiler.is_compiling`` is True there although these models are not captured.
    """
    global _paused
    before, _paused = _paused, True
    try:
        yield
    finally:
        _paused = before


def compiling() -> bool:
    """Whether the calling code is being captured into a graph. Torch before 2.3 does not say so."""
    return _CAN_TELL and not _paused and bool(torch.compiler.is_compiling())


def recording() -> bool:
    """Whether ``make_fx`` or ``aot_function`` records the operators that run, for a graph that is run again."""
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    for name in ("get_proxy_mode", "get_innermost_proxy_mode"):  # the latter in torch 2.1
        if hasattr(proxies, name):
            return getattr(proxies, name)() is not None
    return False


def transforming() -> bool:
    """Whether the calling code runs inside a transform of ``torch.func`` (vmap, grad, ...)."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def tracing_code() -> CodeType | None:
    """The code of the frames in which dynamo traces a call; None before it is imported. A traced call has no frame."""
    dynamo = sys.modules.get("torch._dynamo.symbolic_convert")
    return None if dynamo is None else dynamo.InstructionTranslatorBase.run.__code__


def traced(frame: FrameType) -> tuple[CodeType, dict[str, Any]]:
    """The code that dynamo traces in a frame of :func:`tracing_code`, with that code's variables.

    A variable that is no module, constant or dict is dynamo's object for it.
    """
    tracer = frame.f_locals["self"]
    return tracer.f_code, {name: _traced_value(tracer, value) for name, value in tracer.symbolic_locals.items()}


def _traced_value(tracer: Any, variable: Any) -> Any:
    lazy = getattr(variable, "_cache", None)
    if lazy is not None and lazy.vt is None:  # dynamo has not looked at it; doing so would add an input to the graph
        return lazy.value
    held = vars(variable if lazy is None else lazy.vt)
    if "pre_existing_contents" in held:  # a cell, of a variable that a closure uses
        try:
            return _traced_value(tracer, tracer.output.side_effects.load_cell(variable))
        except Exception:  # dynamo's own, for a variable that has no value yet
            return variable
    if "module_key" in held:
        return tracer.output.get_submodule(held["module_key"])
    if isinstance(held.get("items"), dict):
        names = {getattr(getattr(key, "vt", key), "value", key): value for key, value in held["items"].items()}
        return {name: _traced_value(tracer, value) for name, value in names.items()}
    return held.get("value", variable)


def unbacked_size(least: int) -> Any:
    """A size that depends on values, for the fake implementation of an operator.

    ``get_ctx().new_dynamic_size`` gives one only with ``fullgraph=True``, or if the user has set
    ``torch._dynamo.config.capture_dynamic_output_shape_ops``. Otherwise the graph would break at the operator, although
    the operator is ours and nothing behind it needs the number.

    Args:
        least: a lower bound that is known.
    """
    context = torch.library.get_ctx()
    allocate = getattr(getattr(torch._library, "fake_impl", None), "allocate_size", None)
    shapes = getattr(context, "_shape_env", None)
    if allocate is None or shapes is None:
        return context.new_dynamic_size(min=least)
    return allocate(shapes, least)


def between_compilations(change: Callable[[], None]) -> None:
    """Make a change to classes or modules now or, while a graph is being compiled, as soon as that is done.

    dynamo checks a new graph's guards at once. If what it has traced was changed since, by a finalizer for example, it
    raises an InternalTorchDynamoError. Its lock tells whether anything is being compiled, in whichever thread.

    Args:
        change: the change. It may be made in another thread.
    """
    lock = _lock_of_dynamo()
    if lock is None:
        return change()
    # This thread's own compilation would let it in again. A finalizer must not wait, and threading.Thread has locks
    # of its own, which the code that the finalizer has interrupted may hold.
    if lock._is_owned() or not lock.acquire(blocking=False):
        _thread.start_new_thread(_made_with, (lock, change))
        return None
    try:
        return change()
    finally:
        lock.release()


def _made_with(lock: Any, change: Callable[[], None]) -> None:
    with lock:
        change()


def _lock_of_dynamo() -> Any:
    """The lock that is held while a graph is compiled; None if there is none, as before the compiler is imported."""
    homes = (sys.modules.get(f"torch._dynamo.{name}") for name in ("convert_frame", "eval_frame"))  # the latter in 2.1
    return next((lock for lock in (getattr(home, "compile_lock", None) for home in homes) if lock is not None), None)
