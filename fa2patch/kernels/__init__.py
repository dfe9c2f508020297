"""Kernels, which compute variable-length attention. Each is a class in a file of its own."""

from .options import Options
from .overview import rows
from .picks import BY_NAME_ONLY, NAMES, ORDER, Pick, Picks, check_name, named, order, pick, register_kernel
from .protocol import FEATURES, Asked, Kernel, asked_by

__all__ = [
    "BY_NAME_ONLY",
    "FEATURES",
    "NAMES",
    "ORDER",
    "Options",
    "Asked",
    "Kernel",
    "Pick",
    "Picks",
    "asked_by",
    "check_name",
    "named",
    "order",
    "pick",
    "register_kernel",
    "rows",
]
