"""What planning raises."""

from __future__ import annotations

from ..errors import Fa2PatchError


class PackingError(Fa2PatchError, ValueError):
    """Lengths, or options, from which no rows can be planned."""
