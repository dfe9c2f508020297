"""The examination of a patched model on its first packed batch, and again after its modules have changed."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from .._torch import compiling, constant, number, numbered, paused
from .._types import Call, Model
from ..documents.boundaries import Boundaries
from ..errors import Fa2PatchError, NothingProven, PackingNotIsolated
from ..proof.unknown import Structure, mode_of, unknown
from ..upstream import attached, heads
from ..upstream.find_layers import ModelLayers
from ..upstream.find_models import is_sharded
from ..upstream.forward import proof, thread, warn_unpacked
from ..upstream.packed_mask import PackedMask
from ..upstream.step import MARK, Patched


class Examined(Patched, Protocol):
    """A patch, as an examination uses it."""

    examination: Examination

    @property
    def active(self) -> bool:
        """Whether the model is patched."""

    def renew(self) -> None:
        """Look again at a model whose modules have changed."""


DOCUMENTS, BRANCHES = "documents", "branches"
"""What is proven: that documents do not see each other, and that segments that continue the same one do not."""

_lock = threading.RLock()
"""Held while a model is examined, so that no other thread uses numbers that are still to be proven."""


@dataclass
class Examination:
    """The state of the examination of a patched model.

    Attributes:
        prove: the ``prove`` argument of ``apply``.
        must: whether packed batches must be proven.
        proven: what of :data:`DOCUMENTS` and :data:`BRANCHES` was proven, each with the model's mode.
        batches: the number of packed batches that must have been proven.
        structure: the model's structure when it was last looked at; None before that.
        under_way: whether the model is being run in order to examine it. Such packed batches are not examined.
        number: by which a compiled graph looks up the patch.
    """

    prove: bool | str
    must: bool
    structure: Structure | None = None
    proven: set[tuple[str, int]] = field(default_factory=set)
    batches: int = 0
    under_way: bool = False
    number: str = ""

    @contextlib.contextmanager
    def paused(self, on: bool = True) -> Iterator[None]:
        """Examine no packed batches inside this context, if it is on."""
        before, self.under_way = self.under_way, self.under_way or on
        try:
            yield
        finally:
            self.under_way = before


def begun(patch: Examined, prove: bool | str, layers: ModelLayers | None = None, must: bool = False) -> Examination:
    """A new examination of a model that has just been planned, or of a copy, which is looked at on its first batch.

    Args:
        patch: the model's patch. Compiled graphs look it up by the examination's number.
        prove: the ``prove`` argument of ``apply``.
        layers: the model and its layers, to be asked whether it holds what is unknown; None for a copy.
        must: whether packed batches of a copy must be proven.
    """
    if layers is not None:
        must = prove is True or (prove == "unknown" and bool(unknown(layers)))
    return Examination(prove, must, number=number(patch))


def keep_structure(patch: Examined) -> None:
    """Take the structure of a model as the one that was planned, after fa2patch itself has changed it."""
    patch.examination.structure = Structure(patch.model)


def _has_changed(patch: Examined) -> bool:
    """Whether the model is another one than was last looked at. A change by fa2patch itself is looked at here."""
    kept = patch.examination.structure
    if kept is None or kept.is_as_kept():
        return kept is None
    now = Structure(patch.model)
    if now.number != kept.number:
        return True
    patch.examination.structure = now
    return False


def examine(patch: Examined, module: Model, call: Call, mask: PackedMask) -> None:
    """Examine a model before it computes a packed batch: renew the patch of changed modules, and prove the batch.

    A batch is proven only if a proof is due and the batch has two documents or more: the first such batch in a mode,
    the first in which segments continue the same one, as a module may know documents and no parents, and then batches
    2, 4, 8, ..., because what a value inside foreign code decides may change without a sign. A sharded model is proven
    only with ``prove=True``; otherwise :class:`NothingProven` is warned.

    Args:
        patch: the model's patch.
        module: the model that was called.
        call: its arguments by name.
        mask: the packed mask of the batch.

    Raises:
        PackingNotIsolated: documents see each other in a module that fa2patch does not know, or a model around this one
            is not patched. While a graph is captured, this error replaces the following ones.
        LayerNotPatchable, UnsupportedModel: the model's modules have changed, and it can no longer be patched.
    """
    examination = patch.examination
    if compiling():
        found = _examined(examination.number, mask.boundaries.parents is not None)
        if found:
            raise PackingNotIsolated(found)
        return
    if examination.under_way or thread.proves:
        return
    if getattr(call.get("position_ids"), attached.PADDING, None) is None:
        heads.require_patched(patch)
        patch.tally.rows = True
    if vars(module).get("_is_replica") or patch.model.__dict__.get(MARK) is not patch:  # reverted
        return
    kept = examination.structure  # asked here, so that a batch of a model as it was needs no other call
    if (kept is None or not kept.is_as_kept()) and _has_changed(patch):
        with _lock:
            if _has_changed(patch):
                patch.renew()
        examination = patch.examination
    if not examination.must:
        return
    with _lock:  # another thread's batch may be what is being proven
        _examine(patch, module, call, mask)


def _examine(patch: Examined, module: Model, call: Call, mask: PackedMask) -> None:
    examination, name = patch.examination, type(patch.model).__name__
    due = _due(examination, module, mask.boundaries)
    if not due:
        return
    if mask.part is not None:
        held = unknown(ModelLayers(patch.model)) or "nothing in it"
        raise PackingNotIsolated(
            f"{name} must prove that its modules keep documents apart (prove={examination.prove!r}; fa2patch does not "
            f"know {held}), and sequence parallelism (sp_size) splits rows over processes, so that none can prove it "
            "by itself. Call fa2patch.verify(model, batch=batch) on every rank, then "
            "fa2patch.apply(model, prove=False)."
        )
    if is_sharded(patch.model) and examination.prove is not True:
        examination.must = False
        warnings.warn(
            f"{name} holds what fa2patch does not know, {unknown(ModelLayers(patch.model))}, and is sharded, so that "
            "one rank cannot prove it by itself. Call fa2patch.verify(model, batch=batch) on every rank, or "
            "fa2patch.apply(model, prove=False).",
            NothingProven,
            stacklevel=2,
        )
        return
    _prove(patch, due, module, call, mask)


def _due(examination: Examination, module: Model, boundaries: Boundaries) -> set[tuple[str, int]]:
    """What a batch must prove, each with the model's mode. The device is read only if something may be due."""
    examination.batches += 1
    again = examination.batches & (examination.batches - 1) == 0
    mode = mode_of(module)
    if not again and (DOCUMENTS, mode) in examination.proven and boundaries.parents is None:
        return set()
    roots = [length for length in boundaries.lengths if length]
    held = []
    if boundaries.tree is not None:
        roots = [at for at, parent in enumerate(boundaries.tree.parents) if parent < 0 and boundaries.tree.lengths[at]]
        held += [BRANCHES] if len(boundaries.tree.leaves) > len(roots) else []
    held += [DOCUMENTS] if len(roots) > 1 else []
    return {(what, mode) for what in held if again or (what, mode) not in examination.proven}


def _prove(patch: Examined, due: set[tuple[str, int]], module: Model, call: Call, mask: PackedMask) -> None:
    """Prove a batch on a replica of the model, or on the model itself if the replica does not see the whole forward."""
    from ..proof import proving  # with five more modules, which only a model with unknown modules needs

    try:
        try:
            with proof(), patch.examination.paused(is_sharded(patch.model)):
                proving.prove(module, call, mask)
        except proving.Unseen:
            with proof(), patch.examination.paused():
                proving.prove(module, call, mask, itself=True)
    except proving.Unseen as error:
        raise PackingNotIsolated(str(error)) from None
    patch.examination.proven |= due


@constant
def _examined(given: str, tree: bool) -> str:
    """The message of the error that :func:`examine` finds while a graph is captured; empty if there is none.

    The batch has no values during the capture, so an example batch is proven instead.
    """
    patch: Examined = numbered(given)
    if patch.examination.under_way:
        return ""
    with paused():
        try:
            heads.require_patched(patch)
            patch.tally.rows = True
            if _has_changed(patch):
                patch.renew()
            if patch.examination.must:
                from ..proof import proving  # as in _prove

                call, mask = proving.example_of(patch.model, patch, tree)
                due = _due(patch.examination, patch.model, mask.boundaries)
                if due:
                    _prove(patch, due, patch.model, call, mask)
        except Fa2PatchError as error:
            return error.message
    return ""


@constant
def capture_unpacked(given: str) -> bool:
    """Warn once if a graph is captured for training batches without document information.

    A graph cannot count batches: a count that it reads would make a new graph for every batch. So the warning comes
    with the first such graph. False is returned because a constant of a graph needs a value.
    """
    patch: Examined = numbered(given)
    if patch.unpacked is not None:
        warn_unpacked(patch, "a graph was compiled for training batches that do not say")
    return False
