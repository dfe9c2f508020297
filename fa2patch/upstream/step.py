"""One model's forward of one batch, on its way through the stages of :mod:`fa2patch.upstream.forward`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from . import luggage
from .calls import Calls
from .packed_mask import PackedMask

MARK = "_fa2patch"
"""Name of the instance attribute that says that a model is patched. It holds the model's ``Patch``."""

ROLE = "_fa2patch_role"
"""Name of the instance attribute beside it, which holds the model's :class:`Role`."""


class Role(NamedTuple):
    """What one of the models is that a call goes through.

    Attributes:
        outermost: whether no other one is around it.
        innermost: whether it is the one that loops over the layers.
        predicts_the_next: whether its labels are what the token before predicts.
        pools: whether its head pools the last token of each row, which is done for each document.
    """

    outermost: bool
    innermost: bool
    predicts_the_next: bool = False
    pools: bool = False


@dataclass(eq=False)
class Step:
    """One model's forward of one batch.

    Attributes:
        module: the model.
        patch: its ``Patch``.
        role: its place among the models that the call goes through.
        calls: the signature of the forward that will compute.
        args: the arguments that came without names.
        call: the arguments by name. Traits may replace it.
        mask: the batch's documents; None for a dense batch.
        handed: whether a model around this one has put the mask in its place.
        places: whether this step puts the mask in its place, from where it reaches the layers.
        by_hook: whether somebody else's forward will compute, and only a forward pre-hook sees the batch.
        pieces: what rides on this step's tensors, and must have been taken when its forward returns.
    """

    module: Any
    patch: Any
    role: Role
    calls: Calls
    args: tuple[Any, ...]
    call: dict[str, Any]
    mask: PackedMask | None = None
    handed: bool = False
    places: bool = False
    by_hook: bool = False
    pieces: list[luggage.Piece] = field(default_factory=list)

    def attach(self, argument: str, piece: luggage.Piece) -> None:
        """Let a piece ride on an argument. The step's end requires that somebody has taken it."""
        self.call[argument] = luggage.attach(self.call[argument], piece)
        self.pieces.append(piece)

    def send_documents(self) -> None:
        """Let the documents ride on ``position_ids``, to a module that computes each of them by itself."""
        if self.mask is None or not self.places or not self.calls.takes("position_ids"):
            return
        if not any(piece.kind == luggage.DOCUMENTS for piece in self.pieces):
            self.attach("position_ids", luggage.Piece(luggage.DOCUMENTS, self.mask.boundaries))
