"""A CUDA device that computes on the CPU, so that a test sees there what fails only on a GPU.

Its tensors say that they are on ``cuda:0`` and hold their numbers on the CPU. What torch refuses on a GPU is refused:
tensors of several devices in one operator, an assertion whose message is too long, and operators without a
deterministic way where one is asked for. What makes the host wait is noted. The engine of autograd needs a real device,
so that the graph is walked here instead. ``stand_in_aten`` has the operators of torch's varlen kernels.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

CUDA = torch.device("cuda:0")

# torch's table of what switches between devices, by type (c10/core/DeviceType.h). One that does nothing serves.
_GUARDS, _TYPES, _CUDA, _META = "_ZN3c104impl26device_guard_impl_registryE", 20, 1, 14

LONGEST = 254  # characters of an assertion's message that a CUDA device takes
MIXES = ("copy_", "_to_copy", "index", "index_put", "index_put_")  # operators that take indices or values of the CPU
READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "bincount")
# of floating-point numbers, where torch.use_deterministic_algorithms is on
NOT_DETERMINISTIC = ("cumsum", "index_add", "index_add_", "scatter_add", "scatter_add_", "put_", "histc")

NOT_LAZY = {"_conj": torch.conj_physical, "_neg_view": torch.neg}

waits: Counter[str] = Counter()  # what made the host wait, by operator and line


class OnCuda(torch.Tensor):
    held: torch.Tensor  # its numbers, on the CPU
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OnCuda:
        like: Any = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, device=CUDA, **like)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    def __repr__(self, **_: Any) -> str:
        return f"OnCuda({self.held!r})"

    def tolist(self) -> Any:
        _wait("tolist")
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs, to = func.overloadpacket.__name__, kwargs or {}, (kwargs or {}).get("device")
        _refuse(func, name, args, kwargs)
        if _waits(name, args, kwargs, to):
            _wait(name)
        inside = kwargs if to is None else {**kwargs, "device": torch.device("cpu")}
        on_cpu, more = tree_map_only(OnCuda, lambda one: one.held, (args, inside))
        if name == "histc":  # a CPU counts no integers
            return cls(func(on_cpu[0].double(), *on_cpu[1:], **more).to(on_cpu[0].dtype))
        if name in NOT_LAZY:  # within a dispatch, a CPU's kernels do not look at a tensor's bits
            return cls(NOT_LAZY[name](*on_cpu))
        with torch._C.DisableTorchFunction():  # a default device is not one for the numbers
            found = func(*on_cpu, **more)
        if name == "copy_":
            return args[0]
        if to is not None and torch.device(to).type != "cuda":
            return found
        found = tree_map_only(torch.Tensor, cls, found)
        return return_and_correct_aliasing(func, args, kwargs, found)


def _refuse(func: Any, name: str, args: Any, kwargs: Any) -> None:
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    others = [value for value in tensors if not isinstance(value, OnCuda)]
    if name not in MIXES and any(value.dim() or name in ("index_select", "gather", "cat", "stack") for value in others):
        raise RuntimeError(f"Expected all tensors to be on the same device, found some of {func} on cuda:0 and on cpu")
    if name == "_assert_async" and len(args) > 1 and len(args[1]) > LONGEST:
        raise RuntimeError(f"an assertion's message has {len(args[1])} characters, a GPU takes {LONGEST}")
    if name in NOT_DETERMINISTIC and torch.are_deterministic_algorithms_enabled() and args[0].is_floating_point():
        raise RuntimeError(f"{name}_cuda does not have a deterministic implementation")


def _waits(name: str, args: Any, kwargs: Any, to: Any) -> bool:
    masks = [one for one in tree_leaves(args[1:2]) if isinstance(one, torch.Tensor) and one.dtype == torch.bool]
    by_mask = name.startswith("index") and bool(masks)
    sizes = name == "repeat_interleave" and kwargs.get("output_size") is None and len(args) < 3
    leaves = name == "_to_copy" and to is not None and torch.device(to).type == "cpu"
    crosses = name == "copy_" and args[1].dim() and isinstance(args[0], OnCuda) != isinstance(args[1], OnCuda)
    crosses = crosses and not (isinstance(args[0], OnCuda) and (kwargs.get("non_blocking") or args[2:3] == (True,)))
    return bool(name in READS or by_mask or sizes or leaves or crosses)


def _wait(name: str) -> None:
    frame = sys._getframe()
    while "/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__:
        assert frame.f_back is not None
        frame = frame.f_back
    waits[f"{name}, {'/'.join(Path(frame.f_code.co_filename).parts[-3:])}:{frame.f_lineno}"] += 1


def _empty(size: list[int], *, dtype: Any = None, memory_format: Any = None, **_: Any) -> OnCuda:
    made = torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format, device="cpu")
    return OnCuda(made)


def _empty_strided(size: list[int], stride: list[int], *, dtype: Any = None, **_: Any) -> OnCuda:
    return OnCuda(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _arange(*ends: Any, dtype: Any = None, **_: Any) -> OnCuda:
    return OnCuda(torch.arange(*ends, dtype=dtype, device="cpu"))


def _number(one: OnCuda) -> Any:
    _wait("_local_scalar_dense")  # of an argument, which torch asks for past the class
    return one.held.item()


class _Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls)  # the numbers of a CPU


MADE = {
    "empty.memory_format": _empty, "empty_strided": _empty_strided, "_local_scalar_dense": _number,
    # torch resizes what it fills
    "arange": _arange, "arange.start": _arange, "arange.start_step": _arange,
}  # fmt: skip
ASKED = {
    "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0, "_lazy_init": lambda: None,
    "get_device_capability": lambda *_: (9, 0), "get_device_name": lambda *_: "a look-alike",
    "is_bf16_supported": lambda *_: True, "is_current_stream_capturing": lambda: False, "synchronize": lambda *_: None,
    "get_rng_state": lambda *_: torch.get_rng_state(), "set_rng_state": lambda *_: None,
}  # fmt: skip


@contextlib.contextmanager
def cuda() -> Iterator[Counter[str]]:
    """Give torch the device, within the block. What made the host wait for it is counted."""
    library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libc10.so"))
    guards = (ctypes.c_void_p * _TYPES).in_dll(library, _GUARDS)
    factories, internal = torch.library.Library("aten", "IMPL"), torch._C
    guard, lifts = guards[_CUDA], internal._only_lift_cpu_tensors()  # type: ignore[attr-defined]
    waits.clear()
    with contextlib.ExitStack() as stack:
        stack.callback(guards.__setitem__, _CUDA, guard)
        stack.callback(internal._set_only_lift_cpu_tensors, lifts)  # type: ignore[attr-defined]
        stack.callback(factories._destroy)
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, False)
        torch.__future__.set_overwrite_module_params_on_conversion(True)  # `.data` of a parameter cannot be replaced
        guards[_CUDA] = guards[_META]
        internal._set_only_lift_cpu_tensors(True)  # type: ignore[attr-defined]
        for name, function in MADE.items():
            factories.impl(name, function, "CUDA")
        stack.enter_context(mock.patch.multiple(torch.cuda, **ASKED))
        stack.enter_context(mock.patch.object(torch, "Generator", _Generator))
        stack.enter_context(mock.patch.object(torch.autograd, "grad", grad))
        stack.enter_context(mock.patch.object(torch.Tensor, "backward", backward))
        yield waits


def moved(module: Any) -> Any:
    """The module, whose parameters and buffers are those of the device from now on."""
    made: dict[int, Any] = {id(None): None}  # by the parameter's id: layers may share one
    for parameter in module.parameters():
        made[id(parameter)] = torch.nn.Parameter(OnCuda(parameter.detach()), parameter.requires_grad)
    for part in module.modules():
        for name, parameter in part._parameters.items():
            part._parameters[name] = made[id(parameter)]
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else OnCuda(buffer)
    return module


# --- autograd -------------------------------------------------------------------------------------------------

_engine = torch.autograd.grad


def grad(outputs: Any, inputs: Any, grad_outputs: Any = None, **more: Any) -> Any:
    of, wanted = ([each] if isinstance(each, torch.Tensor) else [*each] for each in (outputs, inputs))
    if not any(isinstance(each, OnCuda) for each in of):
        return _engine(outputs, inputs, grad_outputs, **more)
    given = [grad_outputs] * len(of) if grad_outputs is None else grad_outputs
    given = [given] if isinstance(given, torch.Tensor) else given
    with torch.no_grad():
        found = _walked(zip(of, given), [get_gradient_edge(each)[:2] for each in wanted])
        if more.get("materialize_grads"):
            return tuple(torch.zeros_like(each) if one is None else one for one, each in zip(found, wanted))
    return tuple(found)


def backward(tensor: torch.Tensor, *unused: Any, **more: Any) -> None:
    leaves = [node.variable for node in _in_order([tensor.grad_fn]) if hasattr(node, "variable")]
    for leaf, gradient in zip(leaves, grad(tensor, leaves)):
        if gradient is not None:
            leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient


def _walked(outputs: Any, wanted: list[Any]) -> list[torch.Tensor | None]:
    sums: dict[Any, dict[int, torch.Tensor]] = {}
    for output, gradient in outputs:
        _add(sums, *get_gradient_edge(output)[:2], torch.ones_like(output) if gradient is None else gradient)
    kept: dict[Any, dict[int, torch.Tensor]] = {node: {} for node, _ in wanted}
    for node in _in_order([*sums]):
        own = sums.pop(node, {})
        if node in kept:
            kept[node] = own
        if own and not hasattr(node, "variable"):
            into = _called(node, own)
            for (after, place), gradient in zip(node.next_functions, into if isinstance(into, tuple) else (into,)):
                if after is not None and gradient is not None:
                    _add(sums, after, place, gradient)
    return [kept[node].get(place) for node, place in wanted]


def _called(node: Any, own: dict[int, torch.Tensor]) -> Any:
    about = node._input_metadata
    if callable(node):
        return node(*(own.get(place) for place in range(len(about))))
    zeros = (torch.zeros(each.shape, dtype=each.dtype, device=each.device) for each in about)  # of a Function
    return node.apply(*(own.get(place, zero) for place, zero in enumerate(zeros)))


def _add(sums: dict[Any, dict[int, torch.Tensor]], node: Any, place: int, gradient: torch.Tensor) -> None:
    about, own = node._input_metadata[place], sums.setdefault(node, {})
    gradient = gradient.sum_to_size(about.shape).to(about.dtype)
    own[place] = own[place] + gradient if place in own else gradient


def _in_order(roots: list[Any]) -> list[Any]:
    # each node before those that get gradients from it
    order: list[Any] = []
    seen, stack = set(), [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node is not None and node not in seen:
            seen.add(node)
            stack += [(node, True), *((after, False) for after, _ in node.next_functions)]
    return order[::-1]
