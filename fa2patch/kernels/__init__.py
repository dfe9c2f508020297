"""Kernels, which compute variable-length attention. Each is a class in a file of its own."""

from .options import Options
from .picks import Pick, Picks, pick
from .protocol import FEATURES, Asked, Kernel, asked_by
from .registry import BY_NAME_ONLY, NAMES, ORDER, check_name, named, order, register_kernel, rows

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
