"""Counts device-to-host reads on a CPU, by whose code asked for them.

On a GPU each waits for all work that is queued there. What counts:

- what dispatches one: ``.item()``, ``int()``, ``bool()``, ``nonzero``, boolean indexing, ``masked_select``, ``equal``,
  ``unique``, ``repeat_interleave`` without ``output_size``;
- ``.cpu()``, ``.to("cpu")``, ``.tolist()``, ``.numpy()``, which dispatch nothing on a CPU, and are counted where they
  are called. Their results, and whatever is computed from these alone, are on the host: ``.cpu().numpy()`` is one read;
- a tensor handed to a kernel as ``max_seqlen``: the kernel's front end, which wants a number, reads it (``arguments``).

Read by a kernel is what a stand-in or the reference, which loop on the host, need to know; a GPU's kernel takes
``cu_seqlens`` as they are. These are kept apart (``kernel``). So is what fa2patch asks of a tensor only if it is on a
CPU (``cpu_only``): elsewhere the same condition is a device-side assertion, which waits for nothing. Copies from the
host to the device are not counted.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode

DISPATCHED = {
    "_local_scalar_dense", "is_nonzero", "nonzero", "nonzero_numpy", "masked_select", "equal", "_unique", "_unique2",
    "unique_dim", "unique_consecutive", "unique_dim_consecutive",
}  # fmt: skip
CALLED = ("cpu", "to", "tolist", "numpy")
KERNELS = ("compat_matrix.check.stand_in", "fa2patch.kernels")
CPU_ONLY = {"_require", "_require_ends"}
"""Functions of fa2patch.boundaries: a read on a CPU, ``aten::_assert_async`` elsewhere."""

DERIVING = {
    "fa2patch": {"recognise"},
    "transformers": {"prepare_fa2_from_position_ids", "prepare_fa_kwargs_from_position_ids"},
}
"""Functions that make boundaries from position_ids."""

_TRANSPARENT = ("torch", "contextlib", __name__)
_HOST = "_bench_on_host"


@dataclass
class Count:
    """Reads of the packages that were asked about, and times that boundaries were derived from position_ids."""

    reads: int = 0
    kernel: int = 0
    cpu_only: int = 0
    arguments: int = 0
    derived: int = 0
    where: Counter[str] = field(default_factory=Counter)


@contextlib.contextmanager
def counted(packages: tuple[str, ...] = ("fa2patch", "transformers")) -> Iterator[Count]:
    """Count the reads of these packages' code, derivations included, within the block."""
    count = Count()
    originals = {name: getattr(torch.Tensor, name) for name in CALLED}

    def note(name: str) -> None:
        _attribute(count, name, packages, sys._getframe(2))

    def reading(name: str) -> Any:
        original = originals[name]

        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if name == "to" and not _to_host(args, kwargs):
                return original(self, *args, **kwargs)
            if not _on_host(self):
                note(name)
            found = original(self, *args, **kwargs)
            return _marked(found.view_as(found)) if isinstance(found, torch.Tensor) else found

        return read

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_name in DERIVING.get(_module(frame).partition(".")[0], ()):
            count.derived += 1

    before = sys.getprofile()
    for name in CALLED:
        setattr(torch.Tensor, name, reading(name))
    try:
        _active.append(count)
        with _Dispatched(note):
            sys.setprofile(profile)
            yield count
    finally:
        sys.setprofile(before)
        _active.remove(count)
        for name in CALLED:
            setattr(torch.Tensor, name, originals[name])


def watched(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that counts tensors handed to it as ``max_seqlen_q`` and ``max_seqlen_k``."""

    @functools.wraps(kernel)
    def call(*args: Any, **kwargs: Any) -> Any:
        for count in _active:
            count.arguments += sum(isinstance(kwargs.get(f"max_seqlen_{of}"), torch.Tensor) for of in "qk")
        return kernel(*args, **kwargs)

    return call


_active: list[Count] = []


class _Dispatched(TorchDispatchMode):
    def __init__(self, note: Any) -> None:
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = [value for value in _flat((args, kwargs)) if isinstance(value, torch.Tensor)]
        on_host = bool(tensors) and all(map(_on_host, tensors))
        if not on_host and (name in DISPATCHED or _boolean_index(name, args) or _unsized(func, name, kwargs)):
            self.note(name)
        found = func(*args, **kwargs)
        if on_host and not func._schema.is_mutable:
            for value in _flat(found):
                if isinstance(value, torch.Tensor):
                    _marked(value)
        return found


def _flat(values: Any) -> Iterator[Any]:
    if isinstance(values, (list, tuple)):
        for value in values:
            yield from _flat(value)
    elif isinstance(values, dict):
        yield from _flat(list(values.values()))
    else:
        yield values


def _boolean_index(name: str, args: Any) -> bool:
    indices = _flat(args[1]) if name in ("index", "index_put", "index_put_", "_index_put_impl_") else ()
    return any(isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _unsized(func: Any, name: str, kwargs: Any) -> bool:
    return name == "repeat_interleave" and "Tensor" in func._overloadname and kwargs.get("output_size") is None


def _to_host(args: Any, kwargs: Any) -> bool:
    """Asked for by its name; ``.to(x.device)`` is a CPU here and the GPU there."""
    return "cpu" in [value for value in (*args, kwargs.get("device")) if isinstance(value, str)]


def _on_host(tensor: torch.Tensor) -> bool:
    return getattr(tensor, _HOST, False)


def _marked(tensor: torch.Tensor) -> torch.Tensor:
    setattr(tensor, _HOST, True)
    return tensor


def _module(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _attribute(count: Count, name: str, packages: tuple[str, ...], frame: Any) -> None:
    """To the innermost frame outside torch, unless a kernel, or a check that only a CPU makes, stands around it."""
    while frame is not None and _is_in(_module(frame), _TRANSPARENT):
        frame = frame.f_back
    if frame is None:
        return
    asked = f"{name} in {_module(frame)}.{frame.f_code.co_name}"
    whose, around = _is_in(_module(frame), packages), frame
    while around is not None:
        if _is_in(_module(around), KERNELS):
            count.kernel += 1
            return
        if around.f_code.co_name in CPU_ONLY and _module(around) == "fa2patch.documents.boundaries":
            count.cpu_only += 1
            return
        around = around.f_back
    if whose:
        count.reads += 1
        count.where[asked] += 1
