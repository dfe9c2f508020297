"""Counts what must not grow: host reads of tensors, and tensors of the row's length squared."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fa2patch.upstream import packed_batch

READS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal")
PACKAGE = "fa2patch"


@dataclass
class Count:
    """The host reads of fa2patch's own code.

    Attributes:
        total: The number of reads that wait for the device.
        views: The number of calls of ``.numpy()``. They do not wait on a CPU; elsewhere they follow a copy that does.
        derived: How often boundaries were derived from ids.
        where: The operation, module and line of each read.
    """

    total: int = 0
    views: int = 0
    derived: int = 0
    where: list[str] = field(default_factory=list)


class _Reads(TorchDispatchMode):
    def __init__(self, count: Count) -> None:
        super().__init__()
        self.count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        boolean = name.startswith("index") and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool
            for arg in args
            if isinstance(arg, (list, tuple))
            for index in arg
        )
        if name in READS or boolean:
            _attribute(self.count, name)
        return func(*args, **(kwargs or {}))


def _attribute(count: Count, name: str, view: bool = False) -> None:
    """Count the read if the innermost Python frame outside torch, contextlib and this file is fa2patch's."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module != __name__ and module.split(".")[0] not in ("torch", "contextlib"):
            if module.split(".")[0] == PACKAGE:
                if view:
                    count.views += 1
                else:
                    count.total += 1
                count.where.append(f"{name} in {module}:{frame.f_lineno}")
            return
        frame = frame.f_back


@contextmanager
def counted() -> Iterator[Count]:
    """Count reads within the block. ``tolist`` is replaced, because on a CPU tensor it dispatches no operation."""
    count = Count()
    originals = {"tolist": torch.Tensor.tolist, "numpy": torch.Tensor.numpy}
    recognise = packed_batch.recognise

    def recognised(*args: Any, **kwargs: Any) -> Any:
        count.derived += 1
        return recognise(*args, **kwargs)

    def counting(name: str) -> Any:
        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            _attribute(count, name, view=name == "numpy")
            return originals[name](self, *args, **kwargs)

        return read

    torch.Tensor.tolist, torch.Tensor.numpy = counting("tolist"), counting("numpy")
    packed_batch.recognise = recognised
    try:
        with _Reads(count):
            yield count
    finally:
        torch.Tensor.tolist, torch.Tensor.numpy = originals["tolist"], originals["numpy"]
        packed_batch.recognise = recognise


@dataclass
class Squares:
    """The tensors that :func:`largest_square` found, each as its operation and shape."""

    found: list[str] = field(default_factory=list)


class _Squares(TorchDispatchMode):
    def __init__(self, length: int, seen: Squares) -> None:
        super().__init__()
        self.length, self.seen = length, seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(returned.alias_info is not None for returned in func._schema.returns):
            return result  # the operation returns a view or works in place: no tensor was made
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor) and tuple(tensor.shape[-2:]) == (self.length, self.length):
                self.seen.found.append(f"{func.overloadpacket.__name__} {list(tensor.shape)}")
        return result


@contextmanager
def largest_square(length: int) -> Iterator[Squares]:
    """Record every tensor made within the block whose last two dimensions are both ``length``."""
    seen = Squares()
    with _Squares(length, seen):
        yield seen
