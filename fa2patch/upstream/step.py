"""The state of one model's forward of one batch, what a forward sees of the patch, and the base class of traits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from .._torch import compiling
from .._types import Args, Call, Model
from ..kernels import Picks
from . import attached
from .calls import Calls
from .facts import Facts, Role, Site
from .find_layers import Layer, ModelLayers
from .packed_mask import PackedMask

MARK = "_fa2patch"  # the instance attribute of a patched model that holds its Patch

ROLE = "_fa2patch_role"  # the instance attribute of a patched model that holds its Role

# the instance attribute of a base model that computes padded batches packed; it holds what packs them
PADDING = "_fa2patch_padding"


class Trait:
    """One feature that some models have and packed rows touch.

    ``apply`` asks each trait whether the model has it, whether the model must be refused, and which attributes must be
    replaced. Every forward of a patched model then calls :meth:`before` and :meth:`after` of those that were found. A
    subclass overrides the methods that it needs.

    Attributes:
        name: the trait's key in ``Patch.found``.
        of_head: whether :meth:`refuses` is about a head that cannot be given packed rows. It is not called if the
            model's padded batches are computed packed, because the head gets padded hidden states then. The trait's
            :meth:`before` must refuse a packed batch that reaches the head all the same.
    """

    name: str
    of_head: bool = False

    def finds(self, model: ModelLayers) -> Any:
        """Look for the trait in a model.

        Returns:
            What was found, or None if the model does not have the trait. It is kept in ``Patch.found``, so it must be
            picklable and must not hold modules or tensors.
        """
        return True

    def refuses(self, model: ModelLayers, found: Any) -> None:
        """Raise an :class:`~fa2patch.errors.Fa2PatchError` if a model with this trait cannot be patched."""

    def replaces(self, model: ModelLayers, found: Any) -> Iterable[Site]:
        """The attributes that must be replaced."""
        return ()

    def before(self, step: Step, found: Any) -> None:
        """Check or change the call before a model's forward. ``step.mask`` is None for a dense batch."""

    def after(self, step: Step, found: Any, output: Any) -> Any:
        """Check or change the output after a model's forward, and return it."""
        return output


class Budgeted(Protocol):
    """A budget of tokens, as a forward uses it: see :class:`fa2patch.upstream.passes.Budget`."""

    max_tokens: int

    def computed(self, step: Step) -> Any: ...


@dataclass
class Tally:
    """What a patched model has computed so far."""

    rows: bool = False  # whether it was given packed rows
    batches: int = 0  # padded batches that were computed packed
    cells: int = 0  # their tokens, padding included
    tokens: int = 0  # the tokens that were computed in their place
    why: str = ""  # why the first other batch with a mask stayed padded

    def with_stacks(self, stacks: Iterable[Tally]) -> Tally:
        """What an encoder-decoder has computed, whose stacks count their own tokens of its batches."""
        each = [self, *stacks]
        batches, why = max(one.batches for one in each), next((one.why for one in each if one.why), "")
        return Tally(self.rows, batches, sum(one.cells for one in each), sum(one.tokens for one in each), why)


class Patched(Protocol):
    """A patch, as a forward uses it: see :class:`fa2patch.Patch`."""

    budget: Budgeted | None

    model: Model
    picks: Picks
    facts: Facts
    attention: tuple[Layer, ...]
    before: tuple[tuple[Trait, Any], ...]
    after: tuple[tuple[Trait, Any], ...]
    unpacked: int | None
    stated: bool
    may_be_overwritten: int
    computes_packed: bool
    vouched: bool
    skips: bool
    changes_ids: bool
    tally: Tally

    # A graph that is captured looks the patch up by it.
    @property
    def number(self) -> str: ...

    @property
    def active(self) -> bool: ...

    def renew(self) -> None: ...

    # The patches of an encoder-decoder's stacks
    @property
    def stacks(self) -> tuple[Patched, ...]: ...

    # whether packed batches have to be proven
    def must_prove(self) -> bool: ...

    # This is called before a packed batch is computed.
    def examine(self, module: Model, call: Call, mask: PackedMask) -> None: ...


def covers(around: Patched | None, patch: Patched | None) -> bool:
    # whether a model with the first patch hands its batches to one with the second: the same model, or a stack of it
    return around is not None and (around is patch or patch in around.stacks)


class Weighted(NamedTuple):
    """What a weighted loss is computed from."""

    labels: torch.Tensor  # int64 [batch, length], -100 outside the loss
    weights: torch.Tensor  # float32 [batch, length], 0 outside the loss
    # the divisor of the loss: the number of documents or tokens in the step, from Trainer, or in this batch
    items: Any


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
        mask_received: whether an outer model has passed the packed mask as an argument.
        passes_mask: whether this step passes the packed mask as an argument.
        by_hook: whether a foreign forward is called and this step belongs to a forward pre-hook.
        pieces: what this step has attached to tensors. It must be taken before its forward returns.
        weighted: what the weighted loss of this batch is computed from; None for any other loss.
        kept: what a trait's ``before`` keeps for its ``after``, by the trait's name; None for nothing.
        captured: whether the forward is being captured into a graph.
    """

    module: Model
    patch: Patched
    role: Role
    calls: Calls
    args: Args
    call: Call
    mask: PackedMask | None = None
    mask_received: bool = False
    passes_mask: bool = False
    by_hook: bool = False
    pieces: list[attached.Piece] = field(default_factory=list)
    weighted: Weighted | None = None
    kept: dict[str, Any] | None = None
    captured: bool = field(default_factory=compiling)

    def attach(self, argument: str, piece: attached.Piece) -> None:
        """Attach a piece to an argument. After the forward it is an error if no code has taken it.

        If a subclass and its ``super().forward`` are both patched, this is called twice. A piece that no code has taken
        is not attached again.
        """
        riding = getattr(self.call[argument], piece.kind, None)
        if riding is not None and riding.content is piece.content and not riding.delivered:
            return
        self.call[argument] = attached.attach(self.call[argument], piece)
        self.pieces.append(piece)

    def send_documents(self) -> None:
        """Attach the boundaries to ``position_ids``, for a module that computes each document separately."""
        if self.mask is None or not self.passes_mask or not self.calls.takes_ids:
            return
        if not any(piece.kind == attached.DOCUMENTS for piece in self.pieces):
            self.attach("position_ids", attached.Piece(attached.DOCUMENTS, self.mask.boundaries))
