"""Kernels compute variable-length attention: one small class in one file each; here, what the rest of fa2patch uses."""

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
