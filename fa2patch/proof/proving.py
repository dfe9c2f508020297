"""The proof, on a model's first packed batch, that unknown modules keep its documents apart."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from .._torch import autocast_uncached, outside_the_forward, without_gradients
from .._types import Call, Model
from ..upstream.find_documents import packed_mask_of
from ..upstream.find_models import is_sharded
from ..upstream.packed_mask import PackedMask
from ..upstream.step import MARK, Patched
from . import looking
from .batch_proof import BatchProof, Unseen
from .inputs import example
from .known_base import Elsewhere, KnownBase, has_known_base
from .replica import open_gates, replica
from .runs import left_as_it_was
from .split_rows import WholeRows, whole_call
from .state import State
from .unknown import unknown_modules


def prove(
    model: Model, call: Call, mask: PackedMask, itself: bool = False, hooks: bool = False, repeat: int | None = None
) -> None:
    # For n documents this takes 5 + 2 log2(n) forwards, in training a backward for all but four of them, and up to
    # SHORT documents alone. ``call`` has labels, because a forward of other code may require them. ``hooks`` calls
    # hooks that only look, because other code may read what they keep. ``repeat`` counts the batches that were proven
    # again: such a proof takes five forwards, one backward and one document alone, each time another comparison.
    gradients = torch.is_grad_enabled()
    with contextlib.ExitStack() as stack:
        stack.enter_context(looking.called(hooks))
        stack.enter_context(outside_the_forward(mask.device))
        if itself or is_sharded(model):  # no other thread may use the model meanwhile; a replica lets them
            stack.enter_context(left_as_it_was(model, evaluates=False))
            open_gates(model, [] if is_sharded(model) else unknown_modules(model))
            run = model
        else:
            run = replica(model, unknown_modules(model))
        run, call, mask = _of_whole_rows(run, model, call, mask)
        state = State(run.modules(), of_hooks=hooks)
        stack.callback(state.put_back)
        proof = _proof_of(model)(run, model, call, mask, state)
        stack.enter_context(without_gradients() if not gradients else autocast_uncached())
        if run is not model and proof.split is None and not hooks and has_known_base(model):
            proof.base = KnownBase(proof.inner, call.get("input_ids"), mask)
        try:
            _require(proof, gradients, repeat)
        except (Elsewhere, Unseen):
            if proof.base is None:
                raise
            proof.base = None
            _require(proof, gradients, repeat)


def _require(proof: BatchProof, gradients: bool, repeat: int | None) -> None:
    proof.require_apart(gradients, repeat)
    proof.require_as_alone(repeat)


def _of_whole_rows(run: Any, model: Model, call: Call, mask: PackedMask) -> tuple[Any, Call, PackedMask]:
    # If an engine splits rows, every process runs the same, each with its part of them.
    if mask.part is None:
        return run, call, mask
    call = whole_call(call, mask.part, mask.shape)
    whole = packed_mask_of(dict(call), vars(model)[MARK], always=True)
    assert whole is not None, "its parts were packed"
    return WholeRows(run, mask.part, counts_labels=False), call, whole


def _proof_of(model: Model) -> type[BatchProof]:
    if not vars(model)[MARK].facts.stacks:
        return BatchProof
    from .pairs import PairProof  # which only an encoder-decoder needs

    return PairProof


def call_hooks(model: Model, call: Call, mask: PackedMask) -> None:
    # The batch is computed once, to see what the hooks do that are watched.
    gradients = torch.is_grad_enabled()
    with outside_the_forward(mask.device), autocast_uncached() if gradients else without_gradients():
        run, call, mask = _of_whole_rows(replica(model), model, call, mask)
        state = State(run.modules(), of_hooks=True)
        try:
            proof = _proof_of(model)(run, model, call, mask, state)
            proof.crossing(proof.outputs(None), torch.zeros(mask.shape, dtype=torch.bool, device=mask.device))
        finally:
            state.put_back()


def example_of(model: Model, patch: Patched, tree: bool) -> tuple[Call, PackedMask]:
    # It is used while a graph is captured.
    call = example(model.get_input_embeddings().weight.device, model, tree)
    mask = packed_mask_of(call, patch)
    assert mask is not None, "the example holds several documents"
    return call, mask
