"""Kernels, which compute variable-length attention, and the choice among them."""

from .options import FEATURES, Options
from .picks import (
    BY_NAME_ONLY,
    NAMES,
    ORDER,
    Pick,
    Picks,
    check_name,
    kernel_rows,
    named,
    order,
    packed_attention,
    pick,
    register_kernel,
)
from .protocol import Asked, Kernel, asked_by

__all__ = [
    "BY_NAME_ONLY",
    "FEATURES",
    "NAMES",
    "ORDER",
    "Asked",
    "Kernel",
    "Options",
    "Pick",
    "Picks",
    "asked_by",
    "check_name",
    "named",
    "order",
    "packed_attention",
    "pick",
    "register_kernel",
    "kernel_rows",
]
