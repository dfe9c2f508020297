"""The table of all kernels."""

from __future__ import annotations

from typing import Any

from .protocol import FEATURES, Kernel
from .registry import every_kernel, order


def rows() -> list[dict[str, Any]]:
    """Describe every kernel as a dict of JSON values, in the order in which ``auto`` tries them.

    Kernels that are used by name only come last.

    Returns:
        For each kernel ``name``, ``what``, ``needs``, ``usable`` (whether ``auto`` can use it on this machine),
        ``reason`` (why not), ``devices``, ``dtypes``, ``head_dim`` (the largest, or None), ``features`` (of the best
        build) and ``here`` (features of the installed build).
    """
    return [_row(kernel) for kernel in every_kernel()]


def _row(kernel: Kernel) -> dict[str, Any]:
    able, reason = (False, "asked for by name only") if kernel not in order() else kernel.available()
    return {
        "name": kernel.name,
        "what": kernel.what,
        "needs": kernel.needs,
        "usable": able,
        "reason": reason,
        "devices": list(kernel.DEVICES) if kernel.DEVICES is not None else None,
        "dtypes": [str(x).replace("torch.", "") for x in kernel.DTYPES] if kernel.DTYPES is not None else None,
        "head_dim": kernel.MAX_HEAD_DIM,
        "features": [name for name in FEATURES if name in kernel.FEATURES],
        "here": [name for name in FEATURES if able and name in kernel.features()],
    }
