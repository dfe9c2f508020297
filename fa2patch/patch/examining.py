"""The examination of a patched model on its first packed batch, and again after its modules have changed."""

from __future__ import annotations

import contextlib
import operator
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from .._torch import compiling, constant, is_no_verdict, number, numbered, paused
from .._types import Call, Model
from ..documents.boundaries import Boundaries
from ..documents.names import LENGTHS
from ..errors import Fa2PatchError, NothingProven, PackingNotIsolated
from ..proof import looking
from ..proof.unknown import Structure, mode_of, unknown
from ..upstream import attached, heads, positions
from ..upstream.find_layers import ModelLayers
from ..upstream.find_models import is_sharded
from ..upstream.forward import proof, thread
from ..upstream.packed_mask import PackedMask
from ..upstream.step import MARK, Patched
from ..upstream.transformers_names import ENCODED

# Two things are proven: that documents do not see each other, and that segments that continue the same one do not.
DOCUMENTS, BRANCHES = "documents", "branches"

# The lock is held while a model is examined: no other thread may use numbers that are still to be proven.
_lock = threading.RLock()


@dataclass
class Examination:
    """The state of the examination of a patched model."""

    prove: bool | str  # the argument of apply
    must: bool  # whether packed batches must be proven
    structure: Structure | None = None  # of the model, when it was last looked at
    # The last packed batch, with the model that was called and whether gradients were enabled. It is kept for hooks
    # that are watched, and is None without any.
    batch: tuple[Model, Call, PackedMask, bool] | None = None
    largest: tuple[int, int] = (0, 0)  # the longest row and the largest number of documents of these batches
    proven: set[tuple[str, int]] = field(default_factory=set)  # DOCUMENTS or BRANCHES, with the model's mode
    known: dict[Model, bool] = field(default_factory=dict)  # whether models inside the patched one hold nothing unknown
    batches: int = 0  # how many packed batches had to be proven
    repeats: int = 0  # how many were proven again
    under_way: bool = False  # whether the model is run in order to examine it: such batches are not examined
    number: str = ""  # a compiled graph looks the patch up by it

    @contextlib.contextmanager
    def paused(self, on: bool = True) -> Iterator[None]:
        before, self.under_way = self.under_way, self.under_way or on
        try:
            yield
        finally:
            self.under_way = before


if TYPE_CHECKING:

    class Examined(Patched, Protocol):
        """A patch, as the examination sees it."""

        examination: Examination


def begun(patch: Examined, prove: bool | str, layers: ModelLayers | None = None, must: bool = False) -> Examination:
    # `layers` is None for a copy of a model, which is looked at on its first batch.
    if layers is not None:
        must = prove is True or (prove == "unknown" and bool(unknown(layers)))
    return Examination(prove, must, number=number(patch))


def keep_structure(patch: Examined) -> None:
    # fa2patch itself has changed the model, so the structure that it has now counts as the planned one.
    if patch.examination.prove is False:
        looking.release(patch.model, everywhere=False)
    else:
        looking.watch(patch.model)
    patch.examination.structure = Structure(patch.model)


def _has_changed(patch: Examined) -> bool:
    # A change by fa2patch itself counts as none, and the structure after it is kept.
    kept = patch.examination.structure
    if kept is None or kept.is_as_kept():
        return kept is None
    if patch.examination.prove is not False:
        looking.watch(patch.model)
    now = Structure(patch.model)
    if now.number != kept.number:
        return True
    patch.examination.structure = now
    return False


def examine(patch: Examined, module: Model, call: Call, mask: PackedMask) -> None:
    # This runs before a model computes a packed batch. It renews the patch of a model whose modules have changed, and
    # proves the batch if a proof is due.
    if compiling():
        found = _examined(patch.examination.number, mask.boundaries.parents is not None)
        if found:
            raise PackingNotIsolated(found)
    elif not (patch.examination.under_way or thread.proves or looking.thread.calls is not None):
        looking.thread.read = None
        for name in () if patch.stated else LENGTHS:
            patch.stated = patch.stated or call.get(name) is not None
        if getattr(call.get("position_ids"), attached.PADDING, None) is None:
            heads.require_patched(patch)
            if not patch.tally.rows:
                patch.tally.rows = True
                ids = call.get("position_ids")
                positions.warn_of_ids_from_zero(patch.model, patch.facts.first_position, ids, mask)
        reverted = patch.model.__dict__.get(MARK) is not patch
        if not (reverted or vars(module).get("_is_replica")):
            _renew_and_prove(patch, module, call, mask)


def must_prove(patch: Examined) -> bool:
    kept = patch.examination.structure
    if kept is None or not kept.is_as_kept():
        _renew_if_changed(patch)
    return patch.examination.must


def _renew_if_changed(patch: Examined) -> None:
    if _has_changed(patch):
        with _lock:
            if _has_changed(patch):
                patch.renew()


def _renew_and_prove(patch: Examined, module: Model, call: Call, mask: PackedMask) -> None:
    kept = patch.examination.structure  # asked here, so that a batch of a model as it was needs no other call
    if kept is None or not kept.is_as_kept():
        _renew_if_changed(patch)
    examination = patch.examination  # a renewed patch has a new one
    patch.computes_packed = True
    if examination.structure is not None and examination.structure.watches:
        examination.batch = module, call, mask, torch.is_grad_enabled()
    if examination.must and not _is_known(patch, module):
        with _lock:  # another thread's batch may be what is being proven
            _prove_if_due(patch, module, call, mask)


def _is_known(patch: Examined, module: Model) -> bool:
    # Padded batches, and calls of the base model by itself, are packed in that model only, so that code around it,
    # such as a trainer's fused loss, sees no packed row.
    examination = patch.examination
    if module is patch.model or examination.prove is True:
        return False
    if module not in examination.known:
        examination.known[module] = not unknown(ModelLayers(module))
    return examination.known[module]


def _prove_if_due(patch: Examined, module: Model, call: Call, mask: PackedMask) -> None:
    examination, name = patch.examination, type(patch.model).__name__
    due = _due(examination, module, mask.boundaries, mask.shape)
    if not due:
        return
    if call.get(ENCODED) is not None and not patch.facts.stacks:
        raise PackingNotIsolated(
            f"{name} must prove that its modules keep documents apart (fa2patch does not know "
            f"{unknown(ModelLayers(patch.model)) or 'nothing in it'}), and its batch holds an encoder's states, some "
            "of which would have to be others. Patch the encoder-decoder around it, or call fa2patch.apply(model, "
            "prove=False)."
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


def _due(
    examination: Examination, module: Model, boundaries: Boundaries, shape: tuple[int, int]
) -> set[tuple[str, int]]:
    # A batch with several documents is proven if it is the first in a mode, the first with parents (a module may know
    # documents and no parents), or larger than all before. Batches 2, 4, 8, ... are proven again, because what a value
    # inside foreign code decides may change without a sign. Only here is the device read.
    examination.batches += 1
    size = shape[1], len(boundaries)
    again = examination.batches & (examination.batches - 1) == 0 or any(map(operator.gt, size, examination.largest))
    examination.largest = max(size[0], examination.largest[0]), max(size[1], examination.largest[1])
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
    # A replica of the model is proven, or the model itself if a replica does not see the whole forward.
    # with five more modules, which only a model with unknown modules needs
    from ..proof import proving
    from ..proof.batch_proof import Unseen

    held = looking.watched(patch.model)
    calls = any(hook.changes for hook in held)  # it may change something by what another one keeps
    itself = is_sharded(patch.model) or any(hook.feeds for hook in held)
    examination = patch.examination
    repeat = examination.repeats if due <= examination.proven else None
    try:
        try:
            with proof(), patch.examination.paused(itself):
                proving.prove(module, call, mask, itself, calls, repeat)
        except Exception as error:
            if is_no_verdict(error) or not (held or isinstance(error, Unseen)):
                raise
            with proof(), patch.examination.paused():  # it may read what a hook keeps, of the model, not of the replica
                proving.prove(module, call, mask, itself=True, hooks=bool(held), repeat=repeat)
    except Unseen as error:
        raise PackingNotIsolated(str(error)) from None
    if held:
        from ..proof.state import State, names_of

        names = names_of(patch.model)
        looking.thread.read = lambda: State(patch.model.modules(), read_by=names)
    examination.repeats += repeat is not None
    examination.proven |= due


def hook_changes(patch: Examined) -> None:
    # A hook that was watched has changed something, so the packed batch that is being computed is proven. A dense batch
    # proves nothing before the next packed one. In a backward, the batch it belongs to cannot be seen, so the last
    # packed one is proven.
    examination = patch.examination
    if examination.prove is False or not patch.active:
        return
    examination.must, examination.proven, examination.known = True, set(), {}
    in_backward = torch._C._current_graph_task_id() != -1
    if examination.under_way or examination.batch is None or not (patch.computes_packed or in_backward):
        return
    module, call, mask, gradients = examination.batch
    with _lock, torch.set_grad_enabled(gradients):
        _prove_if_due(patch, module, call, mask)


def _pairs_of_graph(patch: Examined) -> str:
    if not patch.examination.must or patch.examination.proven:
        return ""
    return (
        f"{type(patch.model).__name__} must be proven to keep pairs apart ({unknown(ModelLayers(patch.model))} is not "
        "known), which a graph cannot do. Compute one packed batch before torch.compile."
    )


@constant
def _examined(given: str, tree: bool) -> str:
    # The result is the message of the error that `examine` would raise. A batch has no values during a capture, so an
    # example batch is proven instead.
    patch: Examined = numbered(given)
    if patch.examination.under_way:
        return ""
    with paused():
        try:
            heads.require_patched(patch)
            patch.tally.rows = True
            if _has_changed(patch):
                patch.renew()
            if patch.facts.stacks:
                return _pairs_of_graph(patch)
            unseen = any(not hook.times and not hook.changes for hook in looking.watched(patch.model))
            if patch.examination.must or (unseen and patch.examination.prove is not False):
                from ..proof import proving  # as in _prove

                call, mask = proving.example_of(patch.model, patch, tree)
                if unseen:  # a graph does not watch them
                    with patch.examination.paused():
                        proving.call_hooks(patch.model, call, mask)
                    patch.examination.must |= bool(unknown(ModelLayers(patch.model)))
            if patch.examination.must:
                due = _due(patch.examination, patch.model, mask.boundaries, mask.shape)
                if due:
                    _prove(patch, due, patch.model, call, mask)
        except Fa2PatchError as error:
            return error.message
    return ""
