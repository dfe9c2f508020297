"""What computes packed rows on each kind of device, and what is missing there. Facts, with their sources.

A kernel for a device that few have is loaded only where that device is, or where all kernels are listed.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Callable

import torch

from .protocol import AMD, APPLE, HUAWEI, INTEL, NVIDIA, OLDER_NVIDIA, Kernel

# What is missing on each kind of device, with the source. A kernel's class says on which it runs.
MISSING = {
    NVIDIA: "FlashAttention 3 is for 8 and 9, FlashAttention 4 for 9 to 12",
    OLDER_NVIDIA: "flash kernels: all need 8.0, in the hub's builds too (transformers#47926)",
    AMD: "a run: nobody has tried fa2patch there; FlashAttention 3 and 4, and sinks in aiter",
    HUAWEI: (
        "a run: nobody has tried fa2patch there; softcap, sinks and ALiBi, which the reference computes; one graph"
    ),
    INTEL: (
        "variable lengths in torch's own flash attention (torch-xpu-ops#2853, pytorch#180857): the reference calls "
        "it for each group of documents of near length"
    ),
    APPLE: (
        "a kernel with variable lengths and a backward, also in FlexAttention: the reference calls torch's attention "
        "for each group of documents of near length"
    ),
}

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


def device_rows(kernels: Sequence[Kernel]) -> list[dict[str, Any]]:
    # The kernels are all of them, in the order of auto; those of ELSEWHERE are tried before torch's own.
    own = [kernel for kernel in kernels if kernel.name not in ELSEWHERE]
    place = next(at for at, kernel in enumerate(own) if kernel.name == "torch_varlen")
    own[place:place] = map(elsewhere, ELSEWHERE)
    found = {device: [kernel.name for kernel in own if device in kernel.RUNS_ON] for device in MISSING}
    return [
        {"name": device, "kernels": [*found[device], "reference"], "missing": missing}
        for device, missing in MISSING.items()
    ]
