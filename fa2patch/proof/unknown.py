"""Which modules of a model may mix tokens in a way that ``apply`` cannot see, and whether any have changed since.

The code of torch and Transformers is known, as it came (:mod:`~fa2patch.upstream.inspecting`). Of torch's own modules,
those are known that look at one token at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import repeat
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch

from .. import evidence
from .._types import Model
from ..upstream import forward, hooks, inspecting
from ..upstream.find_layers import attention_layers
from ..upstream.find_mixers import mixers
from ..upstream.find_models import models, text_modules
from ..upstream.inspecting import below_ours, is_known, where_defined
from ..upstream.step import MARK, PADDING, ROLE

HOOKS = {
    "_forward_pre_hooks": "a forward pre-hook",
    "_forward_hooks": "a forward hook",
    "_backward_pre_hooks": "a backward pre-hook",
    "_backward_hooks": "a backward hook",
}
"""The tables of a module's hooks, and what each holds."""

EVERYWHERE = tuple((what, getattr(torch.nn.modules.module, f"_global{table}")) for table, what in HOOKS.items())
"""The tables of torch's hooks of all modules, each after what it holds."""

_nn = torch.nn
_BY_TOKEN = (
    _nn.Linear, _nn.Bilinear, _nn.Embedding, _nn.Identity, _nn.Dropout, _nn.AlphaDropout, _nn.FeatureAlphaDropout,
    _nn.Module, _nn.Sequential, _nn.ModuleList, _nn.ModuleDict, _nn.ParameterList, _nn.ParameterDict,
    _nn.ReLU, _nn.RReLU, _nn.ReLU6, _nn.GELU, _nn.SiLU, _nn.Mish, _nn.ELU, _nn.CELU, _nn.SELU, _nn.LeakyReLU, _nn.PReLU,
    _nn.Sigmoid, _nn.LogSigmoid, _nn.Tanh, _nn.Tanhshrink, _nn.Hardtanh, _nn.Hardswish, _nn.Hardsigmoid,
    _nn.Hardshrink, _nn.Softplus, _nn.Softshrink, _nn.Softsign, _nn.Threshold,
    _nn.CrossEntropyLoss, _nn.BCEWithLogitsLoss, _nn.MSELoss,
)  # fmt: skip
"""Torch's modules that look at one token at a time, and losses, which come after what a document's tokens are."""

_ALONG_THE_LAST = (_nn.Softmax, _nn.LogSoftmax, _nn.Softmin, _nn.GLU)
_OF_SHAPE = tuple(kind for kind in (_nn.LayerNorm, getattr(_nn, "RMSNorm", None)) if kind is not None)

_OUR_ATTRIBUTES = {MARK, ROLE, PADDING}
_OUR_HOOKS = (hooks.before, hooks.after, forward.runs)
_of_class, _code = attrgetter("forward", "__call__"), attrgetter("__code__")


def unknown(model: Model) -> str:
    """What is unknown in a model, with its name and where it is defined; empty if there is nothing.

    That is, in this order: a module's class, its own forward, a hook or another function that it holds, whose code is
    not known, or that is scripted; a hook of all modules; a function of Transformers' modeling code that was replaced;
    a module of torch's that looks along the row, outside layers that are patched; an attention
    layer that computes attention by itself, because such models do not claim flash attention; an architecture, or a
    release of Transformers, that the compatibility matrix has not found isolated.
    """
    return next(_unknown(model), "")


def unknown_modules(model: Model) -> list[torch.nn.Module]:
    """The modules whose class or own forward is unknown, but for scripted ones, where nothing can be changed."""
    own = (module for module in model.modules() if not inspecting.is_scripted(module))
    return [module for module in own if not all(map(is_known, _forwards(module)))]


def _unknown(model: Model) -> Iterator[str]:
    for name, module in model.named_modules():
        yield from _of_module(name or "the model itself", module)
    for what, table in EVERYWHERE:
        yield from (f"{what} of all modules ({where_defined(hook)})" for hook in table.values() if not is_known(hook))
    for home, name in replaceable(type(module) for module in model.modules()):
        function = vars(sys.modules[home])[name]
        if not is_known(function):
            yield f"{home}.{name} ({where_defined(function)})"
    decoder = models(model)[-1]
    layers = list(attention_layers(decoder))
    inside = tuple(f"{name}." for name in [*mixers(decoder, layers), *(layer.name for layer in layers)])
    for name, module in text_modules(decoder):
        if _looks_along_the_row(module) and not f"{name}.".startswith(inside):
            yield f"{name} (torch's {type(module).__name__}, which may look at other tokens)"
    for layer in layers:
        if layer.seam == "formula":
            yield f"{layer.name} ({type(layer.module).__name__}, which computes attention by itself)"
    model_type, version = getattr(model.config, "model_type", ""), sys.modules["transformers"].__version__
    if not evidence.isolates(model_type, version):
        yield f"the architecture {model_type!r}, of which there is no evidence in Transformers {version}"


def _of_module(name: str, module: torch.nn.Module) -> Iterator[str]:
    if inspecting.is_scripted(module):
        yield f"{name} (TorchScript)"
        return
    for function in _forwards(module):
        if not is_known(function):
            yield f"{name} ({where_defined(function)})"
    for what, function in _others(module):
        if not is_known(function):
            yield f"{what} of {name} ({where_defined(function)})"


def replaceable(classes: Iterable[type]) -> Iterator[tuple[str, str]]:
    """The functions that Transformers' files of these classes define: the file's module, and the function's name there.

    A file's forwards look its functions up by their names, so that other packages replace them there.
    """
    for home in dict.fromkeys(cls.__module__ for cls in classes):
        if home.startswith("transformers."):
            yield from ((home, name) for name in inspecting.functions_defined(home) if name in vars(sys.modules[home]))


def _forwards(module: torch.nn.Module) -> Iterator[Any]:
    """The forward of a module's class, a call of its own that goes around it, and a forward set on the object."""
    yield type(module).forward
    if type(module).__call__ is not _nn.Module.__call__:
        yield type(module).__call__
    if "forward" in vars(module):
        yield vars(module)["forward"]


def _others(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """The hooks of a module, and other functions that its attributes hold (an activation), each with what it is."""
    held = vars(module)
    for table, what in HOOKS.items():
        for hook in held.get(table, {}).values():
            yield what, hook
    for name, value in held.items():
        if (
            name not in _OUR_ATTRIBUTES
            and name != "forward"
            and callable(value)
            and not isinstance(value, (_nn.Module, type))
        ):
            yield f"the attribute {name}", value


def _looks_along_the_row(module: torch.nn.Module) -> bool:
    """Whether a module of torch's own may look at other tokens than the one it computes."""
    owner = inspecting.defining(type(module), "forward")
    if not inspecting.is_of_torch(owner) or owner in _BY_TOKEN:
        return False
    if issubclass(owner, _ALONG_THE_LAST):
        return getattr(module, "dim", -1) != -1
    if issubclass(owner, _OF_SHAPE):
        return len(module.normalized_shape) > 1  # type: ignore[arg-type]
    return True


class Structure:
    """A model's modules, their classes, hooks and functions, kept as they are now.

    Every packed batch asks :meth:`is_as_kept`, which compares lists in C: about 0.1 µs for a module, and no call of
    Python's for any. The modules are kept alive until the next look, so that no other object gets the id of one.

    Attributes:
        number: the result of :func:`number_of`, by which a look tells fa2patch's own changes from others.
    """

    def __init__(self, model: Model) -> None:
        modules: list[torch.nn.Module] = list(model.modules())
        held = [vars(module) for module in modules]
        kinds = [cls for cls in dict.fromkeys(map(type, modules)) if hasattr(cls, "forward")]  # TorchScript has none
        tables = [each["_modules"] for each in held]
        hooked = [each[name] for each in held for name in HOOKS if name in each] + [table for _, table in EVERYWHERE]
        names = [(vars(sys.modules[home]), name) for home, name in replaceable(kinds)]
        self.number = number_of(model)
        self._modules, self._classes = modules, list(map(type, modules))
        self._held, self._forwards = held, [each.get("forward") for each in held]
        self._empty = [table for table in (*tables, *hooked) if not table]
        self._tables = [table for table in (*tables, *hooked) if table]
        self._entries = [dict(table.items()) for table in self._tables]
        self._kinds, self._of_kinds = kinds, list(map(_of_class, kinds))
        self._spaces, self._names = [space for space, _ in names], [name for _, name in names]
        self._functions = [space.get(name) for space, name in names]
        inside = [*self._forwards, *self._functions, *(each for pair in self._of_kinds for each in pair)]
        inside += [entry for entries in self._entries for entry in entries.values()]
        plain = (getattr(each, "__func__", each) for each in inside)  # a method holds a function
        self._with_code = list(dict.fromkeys(each for each in plain if isinstance(each, FunctionType)))
        self._codes = list(map(_code, self._with_code))

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled model is looked at again."""
        return type(None), ()

    def is_as_kept(self) -> bool:
        """Whether nothing has changed, neither by fa2patch nor by others. Nothing but C runs for a module."""
        return (
            not any(self._empty)
            and self._tables == self._entries
            and list(map(type, self._modules)) == self._classes
            and list(map(dict.get, self._held, repeat("forward"))) == self._forwards
            and list(map(_of_class, self._kinds)) == self._of_kinds
            and list(map(dict.get, self._spaces, self._names)) == self._functions
            and list(map(_code, self._with_code)) == self._codes
        )


def number_of(model: Model) -> int:
    """A number that changes when modules, their classes, the code that they run or its hooks change.

    That is forwards, calls of classes, functions that Transformers' files define for them, and hooks, those of all
    modules too. What fa2patch itself has put there does not count.
    """
    seen = [model]
    functions: list[Any] = []
    for module in seen:  # the list grows during the loop
        held = module.__dict__
        if "forward" in held:
            functions.append(held["forward"])
        for table in HOOKS:
            functions.extend(hook for hook in held.get(table, {}).values() if hook not in _OUR_HOOKS)
        if held["_modules"]:
            seen.extend(child for child in held["_modules"].values() if child is not None)
    classes: list[Any] = [*map(type, seen)]
    kinds = dict.fromkeys(classes)
    for cls in kinds:
        functions += (below_ours(getattr(cls, "forward", None)), cls.__call__)
    functions.extend(vars(sys.modules[home])[name] for home, name in replaceable(kinds))
    for _, table in EVERYWHERE:
        functions.extend(table.values())
    # ids of functions may come again; most functions have code themselves, and asking for it calls nothing
    codes = (id(getattr(each, "__code__", None) or inspecting.code_called(each)) for each in functions)
    return hash((tuple(map(id, seen)), tuple(map(id, classes)), tuple(map(id, functions)), tuple(codes)))
