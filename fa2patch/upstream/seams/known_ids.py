"""``position_ids`` whose largest value is known on the host.

Flash classes of Mistral, Mixtral, Qwen2, Qwen2MoE, StarCoder2 (4.34 to 4.45) and Phi-3 (to 4.47) size their rotary
table with ``position_ids[:, -1].max().item()``. Without this module, every layer would read from the device.
"""

from __future__ import annotations

from typing import Any

import torch

from ..._types import Function
from .. import inspecting


def reads_them(forward: Function) -> bool:
    """Whether a flash class's ``forward`` reads a tensor's value with ``.item()``."""
    return inspecting.reads_name(forward, "item")


def known(position_ids: torch.Tensor, largest: int) -> torch.Tensor:
    """Return the same ids, for which ``[:, -1].max().item()`` is ``largest``, without a read from the device."""
    try:
        told = position_ids.as_subclass(_Known)
    except RuntimeError:  # torch 2.1 makes no subclass under a dispatch mode; the ids are read then
        return position_ids
    told.largest = largest
    return told


class _Known(torch.Tensor):
    largest: int
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, tuple) and index == (slice(None), -1):
            return _Largest(self.largest)
        return super().__getitem__(index)


class _Largest:
    def __init__(self, value: int) -> None:
        self._value = value

    def max(self) -> _Largest:
        return self

    def item(self) -> int:
        return self._value
