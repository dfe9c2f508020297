"""Kernels compute variable-length attention: one small class in one file each; here, what the rest of fa2patch uses."""

from .overview import rows
from .picks import BY_NAME_ONLY, NAMES, ORDER, Pick, Picks, check_name, named, pick
from .protocol import FEATURES, Asked, Kernel, asked_by

__all__ = [
    "BY_NAME_ONLY",
    "FEATURES",
    "NAMES",
    "ORDER",
    "Asked",
    "Kernel",
    "Pick",
    "Picks",
    "asked_by",
    "check_name",
    "named",
    "pick",
    "rows",
]
