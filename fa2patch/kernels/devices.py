"""What computes packed rows on each kind of device, and what is missing there. Facts, with their sources."""

from __future__ import annotations

from typing import Any

from .picks import every_kernel, order
from .protocol import AMD, APPLE, HUAWEI, INTEL, NVIDIA, OLDER_NVIDIA

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


def device_rows() -> list[dict[str, Any]]:
    tried = order(everywhere=True)
    kernels = [*tried, *(kernel for kernel in every_kernel() if kernel not in tried)]
    return [
        {
            "name": device,
            "kernels": [*(kernel.name for kernel in kernels if device in kernel.RUNS_ON), "reference"],
            "missing": missing,
        }
        for device, missing in MISSING.items()
    ]
