"""The points, with a module for each kind. Importing this package fills :data:`POINTS`."""

from __future__ import annotations

from ..cell import POINTS
from . import caches, harmless, isolation, media, media_dtypes, padded, training, trees, windows

__all__ = [
    "POINTS",
    "caches",
    "harmless",
    "isolation",
    "media",
    "media_dtypes",
    "padded",
    "training",
    "trees",
    "windows",
]
