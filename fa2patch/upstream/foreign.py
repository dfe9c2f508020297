"""Foreign code: whose code a function is, and forwards that other code has put in the place of ours.

Such a forward lies on the class or on the object. Liger, cut-cross-entropy and some trainers do so. It is not known
what they do with the labels of a packed batch, so a forward pre-hook (``hooks.py``) prepares the batch first.
``model(...)`` runs this hook with any ``forward``, but ``model.forward(...)`` does not. PEFT calls the model that way,
and then the base model refuses the batch.
"""

from __future__ import annotations

import functools
import inspect
import sys
from pathlib import Path
from types import BuiltinFunctionType, CodeType, MethodType, MethodWrapperType
from typing import Any, Callable

import torch

from .._torch import compiling, constant
from .._types import Args, Call, Function, Model
from ..documents.names import LABELS, LENGTHS, LOSS_LABELS, REAL
from ..errors import PackingNotIsolated
from . import inspecting
from .calls import Calls, passed
from .inspecting import code_called, own_code, plain

# Whose code it is. A ``__module__`` does not say so, because functools.wraps copies it: the file that defines it does

KNOWN = (
    "torch", "transformers", "fa2patch", "accelerate", "deepspeed.runtime.engine", "deepspeed.runtime.zero",
    "deepspeed.utils",
)  # fmt: skip
"""Packages and modules whose code needs no proof.

Accelerate's forwards and hooks move tensors between devices. Those of DeepSpeed's engine and ZeRO measure time and
gather weights, and under Ulysses no rank could prove them by itself. DeepSpeed's layers, in other files, are not known.
"""

SPLITTERS = ("deepspeed", "ring_flash_attn")
"""Packages whose attention functions split rows over processes, which ``ulysses.py`` looks for."""


def is_known(function: Any) -> bool:
    """Whether a function, and each one that it wraps, is of what :data:`KNOWN` names or is compiled code."""
    return _is_below(function, (*_folders(KNOWN), functools.__file__))  # a decorator of functools says nothing itself


def is_of_transformers(function: Any) -> bool:
    """Whether a function, and each one that it wraps, is Transformers' own."""
    return _is_below(function, (_folder("transformers"), functools.__file__))


def is_of_model(function: Any, modeling: str) -> bool:
    """Whether a function is known, splits rows, or is defined where a model is, as remote code's own attention is.

    Attention and masks of the user's own are computed document by document, because a kernel would compute something
    else. A model whose code is all its own goes by the seams, and is proven.

    Args:
        function: the function.
        modeling: the name of the module that defines the model's layers.
    """
    home = getattr(sys.modules.get(modeling), "__file__", None)
    return _is_below(function, (*_folders((*KNOWN, *SPLITTERS)), *([home] if home else [])))


def require_of_model(function: Any, layer: Any) -> None:
    """Raise if a layer's dense batches are computed by attention of the user's own, which packed ones would drop.

    Raises:
        PackingNotIsolated: the function is not :func:`is_of_model`.
    """
    own = _of_the_user(function, type(layer).__module__)
    if own:
        raise PackingNotIsolated(
            f"{type(layer).__name__} computes attention with {own}, which was not there when the model was patched, "
            "and which a kernel would replace. Call fa2patch.apply(model) again: then each document of a packed batch "
            'is computed by itself, with your function. For speed, load the model with attn_implementation="sdpa", or '
            "make your function a kernel (fa2patch.kernels.register_kernel)."
        )


@constant
def _of_the_user(function: Any, modeling: str) -> str:
    """Where a function is defined that is not :func:`is_of_model`; empty if it is."""
    return "" if is_of_model(function, modeling) else where_defined(function)


def where_defined(function: Any) -> str:
    """Where a function or an object says that it is defined, for an error."""
    function = plain(function)
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{getattr(named, '__module__', None) or '?'}.{named.__qualname__}".replace(".forward", "")


def below_ours(function: Any) -> Any:
    """The function below what fa2patch has put around it."""
    while hasattr(function, "__wrapped__"):
        code = own_code(function)
        if code is None or not code.co_filename.startswith(_folder("fa2patch")):
            break
        function = function.__wrapped__
    return function


def _is_below(function: Any, places: tuple[str, ...]) -> bool:
    function = plain(function)
    code, below = code_called(function), getattr(function, "__wrapped__", None)
    if code is None and below is None:  # compiled code, or an operator of torch (torch.ops)
        compiled = isinstance(function, (BuiltinFunctionType, MethodWrapperType))
        return compiled or type(function).__module__.startswith("torch.")
    if code is not None and not code.co_filename.startswith(places):
        return False
    return below is None or _is_below(below, places)


@functools.cache
def _folder(name: str) -> str:
    """The folder of a package, or the file of a module."""
    module = sys.modules[name]
    file = getattr(module, "__file__", None) or ""
    return f"{Path(file).parent}/" if hasattr(module, "__path__") or not file else file


def _folders(packages: tuple[str, ...]) -> tuple[str, ...]:
    return tuple([_folder(package) for package in packages if package in sys.modules])


# Forwards in the place of ours

HOOKED = "_old_forward"
"""The attribute in which accelerate's hooks (``device_map``, offloading) keep the bound ``forward`` that they call."""

_ours: set[CodeType] = set()


def ours(forward: Function) -> None:
    """Register a function as ours by its code object, because foreign decorators copy function attributes."""
    _ours.add(forward.__code__)


def _is_ours(forward: object) -> bool:
    return own_code(forward) in _ours


def on_top(module: object) -> bool:
    """Whether ``module.forward`` is our function, directly or below accelerate's hooks."""
    own = module.__dict__.get("forward")
    if own is None:
        cls: Any = type(module)
        return of_class(cls.forward)
    hooked = compiling() or _calls_hooked(own)  # else the forward was replaced above the hooks
    return _is_ours(module.__dict__.get(HOOKED, own) if hooked else own)


def looks_up_hooked(own: object) -> bool:
    """Whether a forward on an object looks up :data:`HOOKED` in each call. Those of accelerate 0.23 do not."""
    return HOOKED in getattr(code_called(own), "co_names", ())


def _calls_hooked(own: object) -> bool:
    """Whether a forward on an object is one of accelerate's hooks. Those of 0.23 hold the forward that they call."""
    return looks_up_hooked(own) or "old_forward" in getattr(code_called(own), "co_freevars", ())


@constant
def of_class(forward: Any) -> bool:
    """Whether the forward of a class is ours. Dynamo compiles no frame for it, as it would for a call with a class."""
    return getattr(forward, "__code__", None) in _ours


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


def refuse_bypassed(model: Model, forward: Function, call: Call) -> None:
    """Raise :class:`PackingNotIsolated` if a foreign forward whose call nobody could prepare has led here.

    It was called past the pre-hook, or its arguments had no names. What it does with labels is not known. A base model
    that is called by itself is not refused, nor one that forwards of Transformers and accelerate hand their arguments
    on to, nor a call in which all that may be labels has arrived. A graph shows no callers, so that every such batch is
    refused there.

    Args:
        model: the patched model.
        forward: its foreign forward, or ours around it.
        call: the arguments that have arrived here.
    """
    function, given = getattr(forward, "__func__", forward), None
    if not compiling():
        code, given = code_called(function), _given(model, function)
        led_here = code is None or any(frame.f_code is code for frame in inspecting.running())
        handed_on = (getattr(function, "__wrapped__", None), model.__dict__.get(HOOKED), *getattr(function, "args", ()))
        if not led_here or all(is_known(each) for each in (function, *filter(callable, handed_on))):
            return
        if given is not None and _has_all(call, *given):
            return
    name, code = type(model).__name__, code_called(below_ours(function))
    by = "an object" if code is None else f"{code.co_name} ({code.co_filename}, line {code.co_firstlineno})"
    if given is not None and given[0]:
        raise PackingNotIsolated(
            f"{len(given[0])} arguments without names came to a forward that other code has put on this {name}, {by}, "
            "and not all of them came on to the model with this packed batch: labels among them would cross documents. "
            "Call the model with keywords."
        )
    raise PackingNotIsolated(
        f"the forward of this {name} was replaced after fa2patch.apply, by {by}, and was called as model.forward(...), "
        "past fa2patch: the labels of its packed batch would cross documents. Call fa2patch.apply(model) again, after "
        "what replaces the forward."
    )


def _given(model: Model, forward: Function) -> tuple[Args, Call] | None:
    """What a model that is running was called with; None if its foreign forward was called past torch and us."""
    around = {torch.nn.Module._call_impl.__code__, *({forward.__code__} if _is_ours(forward) else ())}
    called = [found for module, code, found in inspecting.modules_called() if module is model and code in around]
    return (called[-1]["args"], called[-1]["kwargs"]) if called else None


def _has_all(call: Call, args: Args, kwargs: Call) -> bool:
    """Whether a call has all of other arguments that may be labels: those of this name, and those without names."""
    arrived = {id(value) for value in call.values()}
    of_labels = [*args, *passed(kwargs, LABELS).values()]
    return all(isinstance(each, (int, float, str, type(None))) or id(each) in arrived for each in of_labels)


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
