"""The state of one model's forward of one batch, for the stages of :mod:`fa2patch.upstream.forward`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from .._types import Args, Call, Model
from ..kernels import Picks
from . import attached
from .calls import Calls
from .find_layers import Layer
from .packed_mask import PackedMask


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


MARK = "_fa2patch"
"""Name of the instance attribute that marks a patched model. It holds the model's ``Patch``."""

ROLE = "_fa2patch_role"
"""Name of the instance attribute that holds a patched model's :class:`Role`."""

PADDING = "_fa2patch_padding"
"""Name of the instance attribute of a base model that computes padded batches packed. It holds what packs them."""


class Role(NamedTuple):
    """The role of a model among the models that a call goes through.

    Attributes:
        outermost: whether no other model is around it.
        innermost: whether it is the base model, which loops over the layers.
        predicts_the_next: whether a label is predicted by the token before it.
        pools: whether its head pools the last token of each row. Packed batches are pooled for each document.
        lengths: the collator lengths that its ``forward`` and each one that runs through ``super()`` accept.
    """

    outermost: bool
    innermost: bool
    predicts_the_next: bool = False
    pools: bool = False
    lengths: frozenset[str] = frozenset()


class Acting(Protocol):
    """A trait, as a forward uses it."""

    def before(self, step: Step, found: Any) -> None:
        """Called before the forward."""

    def after(self, step: Step, found: Any, output: Any) -> Any:
        """Called after the forward with its output."""


class Patched(Protocol):
    """A patch, as a forward uses it: see :class:`fa2patch.Patch`.

    Attributes:
        model: the Transformers model.
        picks: the kernels that were picked.
        acting: the traits that do something in a forward, each with what it has found.
        unpacked: the number of training batches without document information; None stops the count.
        vouched: whether a packed batch has been seen to reach every layer.
        skips: whether a packed batch has been seen to reach fewer layers.
    """

    model: Model
    picks: Picks
    acting: tuple[tuple[Acting, Any], ...]
    unpacked: int | None
    vouched: bool
    skips: bool

    @property
    def found(self) -> dict[str, Any]:
        """What each trait has found, by its name."""

    @property
    def route(self) -> Route:
        """The way that boundaries take through the model."""

    @property
    def attention(self) -> tuple[Layer, ...]:
        """The layers that must be given the boundaries."""

    def examine(self, module: Model, call: Call, mask: PackedMask) -> None:
        """Called before a packed batch is computed."""

    def capture_unpacked(self) -> None:
        """Called when a training batch without document information is captured in a graph."""


@dataclass(eq=False)
class Step:
    """The state of one model's forward of one batch.

    Attributes:
        module: the model.
        patch: its ``Patch``.
        role: its place among the models that the call goes through.
        calls: the signature of the forward that is called.
        args: the positional arguments.
        call: the arguments by name. Traits may replace it.
        mask: the packed mask; None for a dense batch.
        handed: whether an outer model has passed the packed mask as an argument.
        places: whether this step passes the packed mask as an argument.
        by_hook: whether a foreign forward is called and this step belongs to a forward pre-hook.
        pieces: the luggage that this step has attached. It must be taken before its forward returns.
        kept: what a trait's ``before`` keeps for its ``after``, by the trait's name.
    """

    module: Model
    patch: Patched
    role: Role
    calls: Calls
    args: Args
    call: Call
    mask: PackedMask | None = None
    handed: bool = False
    places: bool = False
    by_hook: bool = False
    pieces: list[attached.Piece] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict)

    def attach(self, argument: str, piece: attached.Piece) -> None:
        """Attach a piece to an argument. After the forward it is an error if no code has taken it.

        A subclass whose ``super().forward`` is patched, too, comes here twice. A piece that nobody has taken stays.
        """
        riding = attached.find(self.call[argument], piece.kind)
        if riding is not None and riding.content is piece.content and not riding.delivered:
            return
        self.call[argument] = attached.attach(self.call[argument], piece)
        self.pieces.append(piece)

    def send_documents(self) -> None:
        """Attach the boundaries to ``position_ids``, for a module that computes each document separately."""
        if self.mask is None or not self.places or not self.calls.takes("position_ids"):
            return
        if not any(piece.kind == attached.DOCUMENTS for piece in self.pieces):
            self.attach("position_ids", attached.Piece(attached.DOCUMENTS, self.mask.boundaries))
