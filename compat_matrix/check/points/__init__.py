"""The points, with a module for each kind. Importing this package fills :data:`POINTS`."""

from __future__ import annotations

from ..cell import POINTS
from . import caches, harmless, isolation, media, pairs, training, trees, windows  # noqa: F401

__all__ = ["POINTS"]
