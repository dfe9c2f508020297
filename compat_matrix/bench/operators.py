"""Counts the operators that torch dispatches within a block, by kind."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..check.reads import DISPATCHED

# "copies" move values without computing any. "others" are neither kernels, copies nor reads.
KINDS = ("kernel", "copies", "others", "reads")

OPERATORS = (
    "_flash_attention_forward", "_flash_attention_backward", "_efficient_attention_forward",
    "_efficient_attention_backward",
)  # fmt: skip
# tests/helpers/fake_kernels.py has operators of this namespace in the place of kernels that are no operators of torch.
OF_STAND_INS = "fa2patch_dry"
COPIES = {
    "clone", "_to_copy", "copy_", "constant_pad_nd", "cat", "index", "index_select", "repeat_interleave", "index_copy",
    "index_put", "index_put_", "slice_backward", "contiguous", "pin_memory",
}  # fmt: skip
ALLOCATES = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "lift_fresh")


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    # Views and allocations start nothing and are not counted.
    found: Counter[str] = Counter(dict.fromkeys(KINDS, 0))

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.update(filter(None, [_kind(func, args, kwargs or {})]))
            return func(*args, **(kwargs or {}))

    with Counting():
        yield found


def _kind(func: Any, args: Any, kwargs: dict[str, Any]) -> str:
    name, to = func.overloadpacket.__name__, kwargs.get("device")
    if func.namespace == OF_STAND_INS or name in OPERATORS:
        return "kernel"
    leaves = name == "_to_copy" and to is not None and torch.device(to).type == "cpu" != args[0].device.type
    if name in DISPATCHED or leaves:
        return "reads"
    if name in COPIES:
        return "copies"
    views = any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)
    return "" if views or name in ALLOCATES or func.namespace == "prim" else "others"
