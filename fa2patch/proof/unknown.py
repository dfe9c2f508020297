"""Which modules of a model may mix tokens in a way that ``apply`` cannot see, and whether any have changed since.

The code of torch and Transformers is known, as it came (:mod:`~fa2patch.upstream.other_code`). Functions of
Transformers' modeling files are looked at, because other packages put their own rotary embedding there. Functions of
torch that somebody replaces belong to no model, and are not looked at.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import repeat
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch

from .._types import Model
from ..upstream import forward, hooks, inspecting
from ..upstream.find_layers import ModelLayers
from ..upstream.find_models import named_modules, stacks_of
from ..upstream.other_code import below_ours, is_known, is_of_transformers, where_defined
from ..upstream.step import MARK, PADDING, ROLE
from .looking import EVERYWHERE, HOOKS, WatchedHook, has_only_looked

_nn = torch.nn

# Torch's modules that look at one token at a time, and losses, which come after what a document's tokens are.
_BY_TOKEN = (
    _nn.Linear, _nn.Bilinear, _nn.Embedding, _nn.Identity, _nn.Dropout, _nn.AlphaDropout, _nn.FeatureAlphaDropout,
    _nn.Module, _nn.Sequential, _nn.ModuleList, _nn.ModuleDict, _nn.ParameterList, _nn.ParameterDict,
    _nn.ReLU, _nn.RReLU, _nn.ReLU6, _nn.GELU, _nn.SiLU, _nn.Mish, _nn.ELU, _nn.CELU, _nn.SELU, _nn.LeakyReLU, _nn.PReLU,
    _nn.Sigmoid, _nn.LogSigmoid, _nn.Tanh, _nn.Tanhshrink, _nn.Hardtanh, _nn.Hardswish, _nn.Hardsigmoid,
    _nn.Hardshrink, _nn.Softplus, _nn.Softshrink, _nn.Softsign, _nn.Threshold,
    _nn.CrossEntropyLoss, _nn.BCEWithLogitsLoss, _nn.MSELoss,
)  # fmt: skip

_ALONG_THE_LAST = (_nn.Softmax, _nn.LogSoftmax, _nn.Softmin, _nn.GLU)
_OF_SHAPE = tuple(kind for kind in (_nn.LayerNorm, getattr(_nn, "RMSNorm", None)) if kind is not None)

_NO_FUNCTIONS = {MARK, ROLE, PADDING, "forward"}  # attributes that are ours, and the one that _forwards gives

_OUR_HOOKS = (hooks.before_other_code, hooks.after_other_code, forward.record_run)
_of_class, _code_of = attrgetter("forward", "__call__"), attrgetter("__code__")


def unknown(model: ModelLayers) -> str:
    """The first thing that is unknown in a model and its layers, and where it is defined; empty if there is nothing."""
    return next(_unknown(model), "")


def unknown_modules(model: Model) -> list[torch.nn.Module]:
    # Nothing can be changed in scripted modules.
    own = (module for module in named_modules(model).values() if not inspecting.is_scripted(module))
    return [module for module in own if not all(map(is_known, _forwards(module)))]


def _unknown(model: ModelLayers) -> Iterator[str]:
    for name, function in _code(model.modules):
        if function is None:
            yield f"{name} (TorchScript)"
        elif not is_known(function):
            yield f"{name} ({where_defined(function)})"
    inside = tuple(f"{name}." for name in [*model.carrying, *(layer.name for layer in model.attention)])
    classes = {cls for cls in {*map(type, model.text_modules.values())} if _is_of_torch(cls)}
    for name, module in model.text_modules.items():
        if type(module) in classes and _looks_along_the_row(module) and not f"{name}.".startswith(inside):
            yield f"{name} (torch's {type(module).__name__}, which may look at other tokens)"
    for layer in model.attention:
        # Models with such layers do not claim flash attention.
        if layer.seam == "formula" and layer.by_itself:
            yield f"{layer.name} ({type(layer.module).__name__}, which computes attention by itself)"
    from .. import evidence  # programs that patch nothing read none of it

    model_type, version = getattr(model.model.config, "model_type", ""), sys.modules["transformers"].__version__
    stacks = stacks_of(model.model)
    if stacks is not None and type(stacks[1]).__module__ != type(model.model).__module__:
        yield f"{type(model.model).__name__}, whose decoder may be of any kind"  # evidence is of one
    if not evidence.isolates(model_type, version):
        yield f"the architecture {model_type!r}, of which there is no evidence in Transformers {version}"


def _code(modules: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    # Each function comes after what it is. It is None for a scripted module.
    classes: set[type] = set()
    for name, module in modules.items():
        name, held = name or "the model itself", vars(module)
        if inspecting.is_scripted(module):
            yield name, None
            continue
        if type(module) not in classes or "forward" in held:  # what a class holds is asked once
            classes.add(type(module))
            yield from ((name, function) for function in _forwards(module))
        for table, what in HOOKS.items():
            if held.get(table):
                yield from ((f"{what} of {name}", hook) for hook in _changing(held[table]))
        for attribute, value in held.items():  # an activation, for example
            if attribute in _NO_FUNCTIONS or not callable(value) or isinstance(value, (_nn.Module, type)):
                continue
            yield f"the attribute {attribute} of {name}", value
        for attribute, value in held.items():  # what the module calls, such as LoRA's variants
            for each in value.values() if type(value) is dict else ():
                if not isinstance(each, _nn.Module) and callable(getattr(each, "forward", None)):
                    yield f"an entry of {attribute} of {name}", each.forward
    for what, everywhere in EVERYWHERE:
        yield from ((f"{what} of all modules", hook) for hook in _changing(everywhere))
    # Functions of Transformers' modeling code may have been replaced.
    for home, name in replaceable(map(type, modules.values())):
        yield f"{home}.{name}", vars(sys.modules[home])[name]


def _changing(table: dict[int, Any]) -> list[Any]:
    hooks = [hook for hook in table.values() if not has_only_looked(hook)]
    return [hook.function if isinstance(hook, WatchedHook) else hook for hook in hooks]


def replaceable(classes: Iterable[type]) -> Iterator[tuple[str, str]]:
    # A file's forwards look its functions up by their names, so that other packages replace them there.
    for home in dict.fromkeys(cls.__module__ for cls in classes):
        if home.startswith("transformers."):
            yield from ((home, name) for name in inspecting.functions_defined(home) if name in vars(sys.modules[home]))


def _forwards(module: torch.nn.Module) -> Iterator[Any]:
    yield type(module).forward
    if type(module).__call__ is not _nn.Module.__call__:
        yield type(module).__call__
    if "forward" in vars(module):
        yield vars(module)["forward"]


def _is_of_torch(cls: type) -> bool:
    # Whether its forward is torch's, and not known to look at one token at a time. FSDP2 makes a class of each layer's,
    # to which Transformers 5.24 hands the layer's own forward.
    owner = inspecting.defining(cls, "forward")
    own = inspecting.is_of_torch(owner) and owner not in _BY_TOKEN
    return own and not is_of_transformers(vars(owner)["forward"])


def _looks_along_the_row(module: torch.nn.Module) -> bool:
    if isinstance(module, _ALONG_THE_LAST):
        return getattr(module, "dim", -1) != -1
    if isinstance(module, _OF_SHAPE):
        return len(module.normalized_shape) > 1
    return True


class Structure:
    """A model's modules, their classes, hooks and functions, kept as they are now."""

    def __init__(self, model: Model) -> None:
        modules: list[torch.nn.Module] = list(named_modules(model).values())
        held = [vars(module) for module in modules]
        kinds = [cls for cls in dict.fromkeys(map(type, modules)) if hasattr(cls, "forward")]  # TorchScript has none
        children = [each["_modules"] for each in held]
        hooked = [each[name] for each in held for name in HOOKS if name in each] + [table for _, table in EVERYWHERE]
        names = [(vars(sys.modules[home]), name) for home, name in replaceable(kinds)]
        # The modules are kept alive until the next look, so that no other object gets the id of one.
        self._modules, self._classes = modules, list(map(type, modules))
        self._held, self._forwards = held, [each.get("forward") for each in held]
        self._empty = [table for table in (*children, *hooked) if not table]
        self._tables = [table for table in (*children, *hooked) if table]
        self._entries = [dict(table.items()) for table in self._tables]
        self._kinds, self._of_kinds = kinds, list(map(_of_class, kinds))
        self._spaces, self._names = [space for space, _ in names], [name for _, name in names]
        self._functions = [space.get(name) for space, name in names]
        inside = [*self._forwards, *self._functions, *(each for pair in self._of_kinds for each in pair)]
        inside += [entry for entries in self._entries for entry in entries.values()]
        plain = (getattr(each, "__func__", each) for each in inside)  # a method holds a function
        self._with_code = list(dict.fromkeys(each for each in plain if isinstance(each, FunctionType)))
        self._codes = list(map(_code_of, self._with_code))
        self.watches = any(isinstance(hook, WatchedHook) for table in hooked for hook in table.values())
        # Its number changes with modules, their classes, the code that they run and their hooks. What fa2patch has put
        # there does not count, nor does a hook that is watched, or that is known and draws no random numbers.
        hooks = [hook for table in hooked for hook in table.values() if not isinstance(hook, WatchedHook)]
        hooks = [hook for hook in hooks if hook not in _OUR_HOOKS and (inspecting.draws(hook) or not is_known(hook))]
        of_kinds = [each for forward, call in self._of_kinds for each in (below_ours(forward), call)]
        functions = [each for each in self._forwards if each is not None] + hooks + of_kinds + self._functions
        # ids of functions may come again; most functions have code themselves, and asking for it calls nothing
        codes = [getattr(each, "__code__", None) or inspecting.code_called(each) for each in functions]
        below = [child for table in children for child in table.values()]
        self.number = hash(tuple(map(id, (*self._modules, *below, *self._classes, *functions, *codes))))

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled model is looked at again.
        return type(None), ()

    def is_as_kept(self) -> bool:
        # Every packed batch asks. Lists are compared in C, about 0.1 µs for a module, and no Python runs for any.
        return (
            not any(self._empty)
            and self._tables == self._entries
            and list(map(type, self._modules)) == self._classes
            and list(map(dict.get, self._held, repeat("forward"))) == self._forwards
            and list(map(_of_class, self._kinds)) == self._of_kinds
            and list(map(dict.get, self._spaces, self._names)) == self._functions
            and list(map(_code_of, self._with_code)) == self._codes
        )


def mode_of(model: Model) -> int:
    training = tuple(module.training for module in model.modules())
    trained = tuple(parameter.requires_grad for parameter in model.parameters())
    return hash((training, trained, torch.is_grad_enabled()))
