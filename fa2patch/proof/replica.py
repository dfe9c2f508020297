"""A copy of a model's modules around the same parameters, which runs while other threads compute with the model.

Its hooks, buffers and modes are its own. Only a model with a forward that calls the model itself past the replica, or
that reads what hooks keep, is proven itself, as a sharded one is.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from .._types import Model
from ..upstream.calls import Calls
from ..upstream.inspecting import is_scripted

# Torch keeps a module's parameters, buffers, modules and hooks in these containers.
_TABLES = tuple(name for name, held in vars(torch.nn.Module()).items() if isinstance(held, (dict, set)))


def replica(model: Model, unknown: Iterable[torch.nn.Module] = ()) -> Model:
    # No parameter of the copy asks for a gradient, so that a backward leaves none. In ``unknown`` modules, parameters
    # that are all zero get small random values: a gate that begins at zero hides what it will let through.
    copies: dict[int, Any] = {}
    made: Model = _copied(model, copies)
    for module in list(copies.values()):
        for name, value in list(vars(module).items()):
            vars(module)[name] = _rebound(value, copies)
    open_gates(made, [copies[id(module)] for module in unknown if id(module) in copies])
    shared: dict[int, torch.nn.Parameter] = {}
    for module in _own(made):
        for name, parameter in module._parameters.items():
            if type(parameter) is torch.nn.Parameter and parameter.requires_grad:  # no other package's class
                if id(parameter) not in shared:
                    shared[id(parameter)] = torch.nn.Parameter(parameter.detach(), requires_grad=False)
                module._parameters[name] = shared[id(parameter)]
    return made


def _copied(module: Any, copies: dict[int, Any]) -> Any:
    if id(module) in copies:
        return copies[id(module)]
    if is_scripted(module):  # torch holds its parts, and its parameters are left as they are
        copies[id(module)] = module
        return module
    below = vars(module)["_modules"].get("_orig_mod")
    # The copy of a compiled module is that of the one below it.
    if below is not None and isinstance(module, torch._dynamo.eval_frame.OptimizedModule):
        copies[id(module)] = made = _copied(below, copies)
        return made
    cls: Any = type(module)
    copies[id(module)] = made = cls.__new__(cls)
    vars(made).update(vars(module))
    for name in _TABLES:
        if name in vars(made):
            vars(made)[name] = vars(made)[name].copy()
    for name, child in vars(made)["_modules"].items():
        vars(made)["_modules"][name] = child if child is None else _copied(child, copies)
    for name, buffer in vars(made)["_buffers"].items():
        vars(made)["_buffers"][name] = buffer if buffer is None else buffer.detach().clone()
    vars(made).update(_is_replica=True, _compiled_call_impl=None)
    return made


def _rebound(value: Any, copies: dict[int, Any]) -> Any:
    # Copies take the places of modules.
    if isinstance(value, torch.nn.Module):
        return copies.get(id(value), value)
    if isinstance(value, types.MethodType):
        return types.MethodType(_rebound(value.__func__, copies), _rebound(value.__self__, copies))
    if type(value) is functools.partial:
        args = [_rebound(each, copies) for each in value.args]
        keywords = {name: _rebound(each, copies) for name, each in value.keywords.items()}
        return functools.partial(_rebound(value.func, copies), *args, **keywords)
    if isinstance(value, types.FunctionType) and value.__closure__:
        return _of_copies(value, copies)
    if isinstance(value, Calls):  # in the closure of our forward
        calls = copy.copy(value)
        calls.original = _rebound(value.original, copies)
        return calls
    if type(value) in (list, tuple) and any(isinstance(each, torch.nn.Module) for each in value):
        return type(value)(_rebound(each, copies) for each in value)
    return value


def _of_copies(function: types.FunctionType, copies: dict[int, Any]) -> Any:
    # The copy has cells of its own. A forward may hold a module in its closure, as one does that calls the forward in
    # whose place it was put.
    if id(function) in copies:
        return copies[id(function)]
    closure = function.__closure__ or ()
    new = [cell for cell in closure if id(cell) not in copies]
    copies.update({id(cell): types.CellType() for cell in new})
    cells = tuple(copies[id(cell)] for cell in closure)
    made = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    vars(made).update(vars(function))
    copies[id(function)] = made
    for cell in new:
        if cell != types.CellType():  # a name that is still to be assigned
            copies[id(cell)].cell_contents = _rebound(cell.cell_contents, copies)
    return made


@torch.no_grad()
def open_gates(model: Model, gates: Iterable[torch.nn.Module]) -> None:
    # New parameters take the places of the old ones in the whole model, because the old ones may be shared with another
    # model.
    generator = torch.Generator().manual_seed(0)
    held = {id(each): each for gate in gates for module in _own(gate) for each in module._parameters.values()}
    opened = {}
    for name, parameter in held.items():
        if parameter is not None and _is_zero(parameter):
            values = (torch.randn(parameter.shape, generator=generator) * 0.1).to(parameter)
            opened[name] = torch.nn.Parameter(values, requires_grad=False)
    for module in _own(model):
        module._parameters.update({name: opened[id(p)] for name, p in module._parameters.items() if id(p) in opened})


def _own(model: torch.nn.Module | Model) -> Iterator[torch.nn.Module]:
    # Scripted modules are no copies.
    return (module for module in model.modules() if not is_scripted(module))


def _is_zero(parameter: torch.Tensor) -> bool:
    plain = parameter.is_floating_point() and parameter.device.type != "meta" and parameter.layout == torch.strided
    return plain and parameter.numel() > 0 and not bool(parameter.any())
