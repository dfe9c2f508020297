"""The table of kernels, from their classes."""

from __future__ import annotations

from typing import Any

from .picks import every_kernel, order
from .protocol import FEATURES, Kernel


def rows() -> list[dict[str, Any]]:
    """Every kernel in ``auto``'s order, as JSON can hold it.

    Returns:
        For each ``name``, ``what``, ``needs``, ``usable`` and ``reason`` (here), ``devices``, ``dtypes``,
        ``head_dim`` (the largest, or None), ``features`` (at its best), ``here`` (of the one installed here).
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
