"""Count the operators that a block dispatches: calls of kernels, copies, other operators, and reads from the device.

Views and allocations start nothing on a device and are not counted.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .counting import DISPATCHED
from .dry_table import KINDS

COPIES = {
    "clone", "_to_copy", "copy_", "constant_pad_nd", "cat", "index", "index_select", "repeat_interleave", "index_copy",
    "index_put", "index_put_", "slice_backward", "contiguous", "pin_memory",
}  # fmt: skip
KERNELS = {
    "_flash_attention_forward", "_flash_attention_backward", "_efficient_attention_forward",
    "_efficient_attention_backward",
}  # fmt: skip
OF_STAND_INS = "fa2patch_dry"
"""The namespace of the operators in the place of kernels that are no operators of torch."""

_ALLOCATES = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "lift_fresh")


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the operators within the block by ``KINDS``."""
    found: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
    with _Counting(found):
        yield found


class _Counting(TorchDispatchMode):
    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = kind_of(func, args, kwargs or {})
        if kind:
            self.found[kind] += 1
        return func(*args, **(kwargs or {}))


def kind_of(func: Any, args: Any, kwargs: dict[str, Any]) -> str:
    """The kind of an operator, or an empty string if it starts nothing on a device."""
    name = func.overloadpacket.__name__
    if func.namespace == OF_STAND_INS or name in KERNELS:
        return "kernel"
    if name in DISPATCHED or (name == "_to_copy" and _leaves(args[0], kwargs.get("device"))):
        return "reads"
    if name in COPIES:
        return "copies"
    views = any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)
    return "" if views or name in _ALLOCATES or func.namespace == "prim" else "others"


def _leaves(states: torch.Tensor, to: Any) -> bool:
    return to is not None and torch.device(to).type == "cpu" != states.device.type
