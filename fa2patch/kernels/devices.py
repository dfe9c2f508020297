"""What computes packed rows on each kind of device, and what is missing there. Facts, with their sources.

A kernel for a device that few have is loaded only where that device is, or where all kernels are listed.
"""

from __future__ import annotations

import importlib
from typing import Any, Callable, NamedTuple

import torch

from .protocol import Kernel


class Device(NamedTuple):
    name: str
    kernels: tuple[str, ...]  # by name, best first; the reference runs everywhere
    missing: str  # what is missing there, and the source


TABLE = (
    Device(
        "NVIDIA, 8.0 and newer", ("flash_attn_3", "flash_attn", "flash_attn_4", "torch_varlen", "efficient", "flex"),
        "FlashAttention 3 is for 8 and 9, FlashAttention 4 for 9 to 12",
    ),
    Device(
        "NVIDIA, older", ("efficient", "flex"),
        "flash kernels: all need 8.0, in the hub's builds too (transformers#47926)",
    ),
    Device(
        "AMD (ROCm)", ("flash_attn", "aiter", "torch_varlen", "efficient", "flex"),
        "a run: nobody has tried fa2patch there; FlashAttention 3 and 4, and sinks in aiter",
    ),
    Device(
        "Huawei (Ascend)", ("ascend",),
        "a run: nobody has tried fa2patch there; softcap, sinks and ALiBi, which the reference computes; one graph",
    ),
    Device(
        "Intel (XPU)", ("flex", "hub"),
        "variable lengths in torch's own flash attention (torch-xpu-ops#2853, pytorch#180857): the reference calls "
        "it for each group of documents of near length",
    ),
    Device(
        "Apple (MPS)", (),
        "a kernel with variable lengths and a backward, also in FlexAttention: the reference calls torch's attention "
        "for each group of documents of near length",
    ),
)  # fmt: skip

# By the name of a kernel: its module, its class, and whether such a device may be here.
ELSEWHERE: dict[str, tuple[str, str, Callable[[], bool]]] = {
    "ascend": ("ascend", "Ascend", lambda: hasattr(torch, "npu")),
    "aiter": ("varlen", "Aiter", lambda: torch.version.hip is not None),
}


_made: dict[str, Kernel] = {}  # no functools.cache, past which dynamo goes, to an import that it cannot trace


def elsewhere(name: str) -> Kernel:
    # There is one kernel of each name, because results of trials are cached by kernel.
    if name not in _made:
        module, kind, _ = ELSEWHERE[name]
        _made[name] = getattr(importlib.import_module(f".{module}", __package__), kind)()
    return _made[name]


def here() -> list[Kernel]:
    return [elsewhere(name) for name, (*_, present) in ELSEWHERE.items() if present()]


def device_rows() -> list[dict[str, Any]]:
    return [{**device._asdict(), "kernels": [*device.kernels, "reference"]} for device in TABLE]
