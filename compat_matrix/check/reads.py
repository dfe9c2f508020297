"""Count what a block asks for: reads from the device, calls of Python functions, tensors of the row's length squared.

A read waits on a GPU for all work that is queued there. On a CPU, what would be such a read is counted. Copies from the
host to the device are not counted. Neither are checks that fa2patch makes only of tensors on a CPU.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Callable
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operators that dispatch a read: .item(), int(), bool(), nonzero, boolean indexing, masked_select, equal, unique, and
# repeat_interleave without output_size.
DISPATCHED = {
    "_local_scalar_dense", "is_nonzero", "nonzero", "nonzero_numpy", "masked_select", "equal", "_unique", "_unique2",
    "unique_dim", "unique_consecutive", "unique_dim_consecutive",
}  # fmt: skip
# These dispatch no read on a CPU, so the methods themselves are replaced. Their results, and tensors computed from
# these alone, are on the host: .cpu().numpy() is one read.
CALLED = ("cpu", "to", "tolist", "numpy")
# Reads of a stand-in or the reference, which loop on the host, count apart: a GPU kernel takes cu_seqlens as a tensor.
KERNELS = ("compat_matrix.check.stand_in", "fa2patch.kernels")
# These read tensors on a CPU only. Elsewhere they call aten::_assert_async, which does not wait, or read nothing.
CPU_ONLY = {
    ("fa2patch.documents.find", "_is_of_ones"),
    ("fa2patch.documents.tensors", "require_here"),
    ("fa2patch.documents.given_boundaries", "_lengths_of"),
    ("fa2patch.documents.given_boundaries", "_agreement"),
    ("fa2patch.upstream.seams.scores", "_hides"),
}

# functions of each package that derive boundaries from position ids
DERIVING = {
    "fa2patch": {"find_boundaries"},
    "transformers": {"prepare_fa2_from_position_ids", "prepare_fa_kwargs_from_position_ids"},
}

_TRANSPARENT = ("torch", "contextlib", __name__)
_HOST = "_bench_on_host"


def calls(function: Callable[[], Any]) -> Counter[str]:
    # Every step of a generator is a call. The sum of the values is the same on any machine with these versions. Garbage
    # is not collected meanwhile: that would add the finalizers and weakref callbacks of whatever ran before.
    found: Counter[str] = Counter()

    def told(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            found[f"{_module(frame)}.{frame.f_code.co_name}"] += 1

    before, collecting = sys.getprofile(), gc.isenabled()
    gc.disable()
    sys.setprofile(told)
    try:
        function()
    finally:
        sys.setprofile(before)
        if collecting:
            gc.enable()
    return found


@dataclass
class Count:
    reads: int = 0  # that code of the chosen packages asked for
    kernel: int = 0  # reads inside a kernel
    arguments: int = 0  # tensors passed to a kernel as max_seqlen: its front end needs a number and reads it
    derived: int = 0  # how often boundaries were derived from position ids
    where: Counter[str] = field(default_factory=Counter)  # the number of "reads" by operator and function

    def note(self, name: str, packages: tuple[str, ...]) -> None:
        # A read belongs to the innermost frame outside torch, or to a kernel around it.
        every = ((_module(frame), frame.f_code.co_name) for frame, _ in traceback.walk_stack(sys._getframe()))
        stack = [*itertools.dropwhile(lambda at: _is_in(at[0], _TRANSPARENT), every)]
        if not stack or not CPU_ONLY.isdisjoint(stack):
            return
        if any(_is_in(module, KERNELS) for module, _ in stack):
            self.kernel += 1
        elif _is_in(stack[0][0], packages):
            self.reads += 1
            self.where[f"{name} in {'.'.join(stack[0])}"] += 1


_active: list[Count] = []


@contextlib.contextmanager
def counted(packages: tuple[str, ...] = ("fa2patch", "transformers")) -> Iterator[Count]:
    # packages: those whose reads are counted in Count.reads
    count = Count()

    def reading(name: str, original: Any) -> Any:
        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            # only the string "cpu" counts, because on a GPU .to(x.device) copies nothing to the host
            if name == "to" and not any(isinstance(to, str) and to == "cpu" for to in (*args, kwargs.get("device"))):
                return original(self, *args, **kwargs)
            if not _on_host([self]):
                count.note(name, packages)
            found = original(self, *args, **kwargs)
            return _marked(found.view_as(found)) if isinstance(found, torch.Tensor) else found

        return read

    methods = {name: reading(name, getattr(torch.Tensor, name)) for name in CALLED}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(torch.Tensor, **methods))
        # they are looked up in their modules, and in those that import them
        for module in list(sys.modules.values()):
            for name in DERIVING.get(getattr(module, "__name__", "").partition(".")[0], ()):
                function = vars(module).get(name)
                if isinstance(function, FunctionType):
                    stack.enter_context(mock.patch.object(module, name, _deriver(count, function)))
        stack.enter_context(_Reads(lambda name: count.note(name, packages)))
        _active.append(count)
        stack.callback(_active.remove, count)
        yield count


def _deriver(count: Count, function: Any) -> Any:
    @functools.wraps(function)
    def derive(*args: Any, **kwargs: Any) -> Any:
        count.derived += 1
        return function(*args, **kwargs)

    return derive


def watched(kernel: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(kernel)
    def call(*args: Any, **kwargs: Any) -> Any:
        for count in _active:
            count.arguments += sum(isinstance(kwargs.get(f"max_seqlen_{of}"), torch.Tensor) for of in "qk")
        return kernel(*args, **kwargs)

    return call


class _Reads(TorchDispatchMode):
    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, on_host = func.overloadpacket.__name__, _on_host((args, kwargs))
        if not on_host and (name in DISPATCHED or _boolean_index(name, args) or _unsized(func, name, kwargs)):
            self.note(name)
        found = func(*args, **kwargs)
        return _marked(found) if on_host and not func._schema.is_mutable else found


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    # The general walk of a tree takes six times as long.
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple, dict)):
            yield from _tensors(value)


def _boolean_index(name: str, args: Any) -> bool:
    indices = _tensors(args[1]) if name in ("index", "index_put", "index_put_", "_index_put_impl_") else ()
    return any(index.dtype in (torch.bool, torch.uint8) for index in indices)


def _unsized(func: Any, name: str, kwargs: Any) -> bool:
    return name == "repeat_interleave" and "Tensor" in func._overloadname and kwargs.get("output_size") is None


def _on_host(values: Any) -> bool:
    found = False
    for tensor in _tensors(values):
        if not getattr(tensor, _HOST, False):
            return False
        found = True
    return found


def _marked(values: Any) -> Any:
    for tensor in _tensors([values]):
        setattr(tensor, _HOST, True)
    return values


def _module(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


class Squares(TorchDispatchMode):
    """Records every tensor made within the block whose last two dimensions are both ``length``."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(returned.alias_info is not None for returned in func._schema.returns):
            return result  # the operation returns a view or works in place: no tensor was made
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor) and tuple(tensor.shape[-2:]) == (self.length, self.length):
                self.found.append(f"{func.overloadpacket.__name__} {list(tensor.shape)}")
        return result
