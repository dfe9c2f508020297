"""Foreign code: whose code a function is, and forwards that other code has put in the place of ours.

Liger, cut-cross-entropy and some trainers put such a forward on the class or on the object. It is not known what they
do with the labels of a packed batch, so a forward pre-hook (``hooks.py``) prepares the batch first. Only ``model(...)``
runs this hook: PEFT calls ``model.forward(...)``, and then the base model refuses the batch.
"""

from __future__ import annotations

import functools
import inspect
import sys
import traceback
from pathlib import Path
from types import BuiltinFunctionType, CodeType, MethodType, MethodWrapperType
from typing import Any, Callable

import torch

from .._torch import compiling, constant
from .._types import Call, Function, Model
from ..documents.names import LABELS, LENGTHS, LOSS_LABELS, REAL
from ..errors import PackingNotIsolated
from . import inspecting
from .calls import Calls, passed
from .inspecting import code_called, own_code, plain

# Whose code it is. A ``__module__`` does not say so, because functools.wraps copies it: the file that defines it does

# Packages and modules whose code needs no proof. Accelerate's forwards and hooks move tensors between devices. Those of
# DeepSpeed's engine and ZeRO measure time and gather weights, and under Ulysses no rank could prove them by itself.
# DeepSpeed's layers, in other files, are not known. LoRA's layers add a product of each token with two matrices; what
# PEFT lets them do instead (DoRA, activated LoRA) is in other files, and so are its layers around quantized ones.
KNOWN = (
    "torch", "transformers", "fa2patch", "accelerate", "deepspeed.runtime.engine", "deepspeed.runtime.zero",
    "deepspeed.utils", "peft.tuners.lora.layer",
)  # fmt: skip

# packages whose attention functions split rows over processes, which engines.py looks for
SPLITTERS = ("deepspeed", "ring_flash_attn")


def is_known(function: Any) -> bool:
    """Whether a function, and each one that it wraps, is of what ``KNOWN`` names or is compiled code."""
    return _is_below(function, (*_folders(KNOWN), functools.__file__))  # a decorator of functools says nothing itself


def is_of_transformers(function: Any) -> bool:
    # Each function that it wraps must be Transformers' own, too.
    return _is_below(function, (_folder("transformers"), functools.__file__))


def is_of_model(function: Any, modeling: str) -> bool:
    """Whether a function is known, splits rows, or is defined where a model is, as remote code's own attention is."""
    # Attention and masks of the user's own are computed document by document, because a kernel would compute something
    # else. A model whose code is all its own goes by the seams, and is proven.
    # `modeling` names the module that defines the model's layers.
    home = getattr(sys.modules.get(modeling), "__file__", None)
    return _is_below(function, (*_folders((*KNOWN, *SPLITTERS)), *([home] if home else [])))


def require_of_model(function: Any, layer: Any) -> None:
    # Packed batches would drop attention of the user's own, which computes this layer's dense batches.
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
    # where the user's function is defined; empty if it is the model's
    return "" if is_of_model(function, modeling) else where_defined(function)


def where_defined(function: Any) -> str:
    # A text for an error says where a function or an object is defined.
    function = plain(function)
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{getattr(named, '__module__', None) or '?'}.{named.__qualname__}".replace(".forward", "")


def below_ours(function: Any) -> Any:
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
    # the folder of a package, or the file of a module
    module = sys.modules[name]
    file = getattr(module, "__file__", None) or ""
    return f"{Path(file).parent}/" if hasattr(module, "__path__") or not file else file


def _folders(packages: tuple[str, ...]) -> tuple[str, ...]:
    return tuple([_folder(package) for package in packages if package in sys.modules])


# Forwards in the place of ours

# the attribute in which accelerate's hooks (device_map, offloading) keep the bound `forward` that they call
HOOKED = "_old_forward"

_ours: set[CodeType] = set()


def ours(forward: Function) -> None:
    # Foreign decorators copy function attributes, so a code object marks our functions.
    _ours.add(forward.__code__)


def _is_ours(forward: object) -> bool:
    return own_code(forward) in _ours


def on_top(module: object) -> bool:
    """Whether ``module.forward`` is our function, directly or below accelerate's hooks."""
    cls: Any = type(module)
    own = module.__dict__.get("forward")
    if own is None:
        is_ours = of_class(cls.forward)
    else:
        hooked = compiling() or _calls_hooked(own)  # else the forward was replaced above the hooks
        is_ours = _is_ours(module.__dict__.get(HOOKED, own) if hooked else own)
    return is_ours


def looks_up_hooked(own: object) -> bool:
    # Forwards of accelerate 0.23 do not look it up.
    return HOOKED in getattr(code_called(own), "co_names", ())


def _calls_hooked(own: object) -> bool:
    # The hooks of accelerate 0.23 hold the forward that they call.
    return looks_up_hooked(own) or "old_forward" in getattr(code_called(own), "co_freevars", ())


@constant
def of_class(forward: Any) -> bool:
    # Dynamo compiles no frame for this, as it would for a call with a class.
    return getattr(forward, "__code__", None) in _ours


def replaced_on(model: Model) -> bool:
    # Accelerate's hooks do not count, because they call ours.
    own = model.__dict__.get("forward")
    return own is not None and not (HOOKED in model.__dict__ and _calls_hooked(own)) and not _is_ours(own)


def entered_first(model: Model, entered: Callable[[Function], Function]) -> MethodType:
    # `entered` makes our forward, which calls the foreign one, from an unbound one.
    own = model.__dict__["forward"]
    if getattr(own, "__self__", None) is model:
        return MethodType(entered(own.__func__), model)

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    first = inspect.Parameter("_model", inspect.Parameter.POSITIONAL_ONLY)  # a partial may have a parameter self
    inspecting.show_parameters(forward, [first, *inspecting.parameters(own)])
    return MethodType(entered(forward), model)


def calls_of(module: torch.nn.Module) -> Calls:
    # Calls are not cached, because a cache would keep the forward alive.
    forward = module.forward
    return Calls(getattr(forward, "__func__", forward), hasattr(forward, "__func__"))


def refuse_bypassed(model: Model, forward: Function, call: Call) -> None:
    # A foreign forward led here and nobody could prepare its call: it was called past the pre-hook, or its arguments
    # had no names. Not refused are a base model that is called by itself, one that forwards of Transformers and
    # accelerate hand their arguments on to, and a call in which all that may be labels has arrived here. A graph shows
    # no callers, so that every such batch is refused there.
    function, given = getattr(forward, "__func__", forward), None
    if not compiling():
        code = code_called(function)
        around = {torch.nn.Module._call_impl.__code__, *({function.__code__} if _is_ours(function) else ())}
        called = [found for one, its, found in inspecting.modules_called() if one is model and its in around]
        given = (called[-1]["args"], called[-1]["kwargs"]) if called else None  # else it was called past torch and us
        led_here = code is None or any(frame.f_code is code for frame, _ in traceback.walk_stack(sys._getframe()))
        handed_on = (getattr(function, "__wrapped__", None), model.__dict__.get(HOOKED), *getattr(function, "args", ()))
        if not led_here or all(is_known(each) for each in (function, *filter(callable, handed_on))):
            return
        if given is not None:  # labels may be passed by name or without one
            arrived, of_labels = {*map(id, call.values())}, [*given[0], *passed(given[1], LABELS).values()]
            if all(isinstance(each, (int, float, str, type(None))) or id(each) in arrived for each in of_labels):
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


def explain_rejected(model: Any, call: Call, error: TypeError) -> None:
    # Our forward takes all of `LENGTHS` and what the collators of fa2patch add. A foreign one may reject them.
    takes = calls_of(model).takes
    unknown = [name for name in passed(call, (*LENGTHS, REAL, LOSS_LABELS)) if not takes(name)]
    if unknown and not on_top(model):
        raise PackingNotIsolated(
            f"the forward of this {type(model).__name__} was replaced after fa2patch.apply by one that does not take "
            f"{unknown[0]}, and was called as model.forward(...), past fa2patch. Call fa2patch.apply(model) again, "
            "after what replaces the forward."
        ) from error
