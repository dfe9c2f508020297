"""The points, a module for each kind of them; importing this package fills :data:`POINTS`."""

from __future__ import annotations

from ..cell import POINTS
from . import harmless, isolation, training, windows

__all__ = ["POINTS", "harmless", "isolation", "training", "windows"]
