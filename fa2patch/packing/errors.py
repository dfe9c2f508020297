"""The error that planning raises."""

from __future__ import annotations

from ..errors import Fa2PatchError


class PackingError(Fa2PatchError, ValueError):
    """Rows cannot be planned from the given lengths or options."""
