"""Counts what must not grow: host reads of tensors, and tensors of the row's length squared."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fa2patch.upstream import packed_batch

READS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal")


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

    def note(self, name: str) -> None:
        """Count a read if the innermost Python frame outside torch, contextlib and this file is fa2patch's."""
        frame: Any = sys._getframe(1)
        while frame is not None:
            module = frame.f_globals.get("__name__", "")
            package = module.split(".")[0]
            if package == "fa2patch" and module != __name__:
                self.views += name == "numpy"
                self.total += name != "numpy"
                self.where.append(f"{name} in {module}:{frame.f_lineno}")
            if module != __name__ and package not in ("torch", "contextlib"):
                return
            frame = frame.f_back


class _Reads(TorchDispatchMode):
    def __init__(self, count: Count) -> None:
        super().__init__()
        self.count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        listed = [each for arg in args if isinstance(arg, (list, tuple)) for each in arg]
        boolean = any(isinstance(each, torch.Tensor) and each.dtype == torch.bool for each in listed)
        if name in READS or (name.startswith("index") and boolean):
            self.count.note(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Count]:
    """Count reads within the block. ``tolist`` is replaced, because on a CPU tensor it dispatches no operation."""
    count, recognise = Count(), packed_batch.recognise

    def recognised(*args: Any, **kwargs: Any) -> Any:
        count.derived += 1
        return recognise(*args, **kwargs)

    def counting(name: str) -> Any:
        original = getattr(torch.Tensor, name)

        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            count.note(name)
            return original(self, *args, **kwargs)

        return read

    replaced = {name: counting(name) for name in ("tolist", "numpy")}
    deriving = mock.patch.object(packed_batch, "recognise", recognised)
    with mock.patch.multiple(torch.Tensor, **replaced), deriving, _Reads(count):
        yield count


class Squares(TorchDispatchMode):
    """Records every tensor made within the block whose last two dimensions are both ``length``.

    Attributes:
        found: The operation and the shape of each of them.
    """

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
