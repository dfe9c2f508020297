"""How the boundaries reach the layers of one model."""

from __future__ import annotations

from typing import NamedTuple


class Route(NamedTuple):
    """How the boundaries pass through the forwards of one model.

    Attributes:
        carrier: the forward argument that is replaced by the :class:`PackedMask`.
        stops_ids: whether the decoder takes no ``position_ids`` (Mamba, RWKV, OPT up to 4.45).
        makes_masks: whether the outermost model makes masks for the models inside it (Gemma 3 up to 4.52).
        apart: whether the decoder computes each document by itself.
    """

    carrier: str
    stops_ids: bool
    makes_masks: bool
    apart: bool = False
