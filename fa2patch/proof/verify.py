"""``verify``: a proof on the user's own model that the documents of a packed batch are isolated."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch

from .._types import Call, Model
from ..binding import used_by
from ..documents.names import IGNORED_LABEL, PARENTS
from ..errors import BadBatch, PackingNotIsolated
from ..upstream.find_models import makes_its_batches, models, token_embeddings, transformers_model
from ..upstream.step import MARK
from . import locate, split_rows
from .inputs import RowSlice, checked, example, require_same_on_every_rank, slices_of
from .measurements import Measurements
from .result import Document, Verification
from .running import is_mixture, left_as_it_was, outputs, rounding

_OTHER = {"document": "", "segment": ", which it does not continue"}
_ALONE = {"document": "it is", "segment": "its path is"}


def verify(
    model: Any, *, batch: dict[str, Any] | None = None, strict: bool = True, max_documents: int | None = None
) -> Verification:
    """Verify that a model isolates the documents of a packed batch, and find the first module that does not.

    Three things must hold for each document:

    - When its tokens are replaced, the outputs of all other documents stay bit for bit the same. A mixture of experts
      may differ by rounding, because its experts then multiply another number of tokens at a time.
    - The gradient of its outputs with respect to all other input embeddings is exactly zero.
    - Its outputs equal those of the document run alone.

    With ``segment_parents``, the same holds for segments. A segment's path is the segment and its ancestors. Its
    outputs must depend on each ancestor and send a gradient to it, and must neither depend on tokens outside of the
    path nor send a gradient there. "Alone" means that the path is run as a document.

    With ``labels``, the loss must not change when the first label of every document is set to -100.

    The cost is one forward for the batch and, for each document, one forward, one backward and one forward alone.
    ``labels`` add up to three forwards, and a segment that does not depend on an ancestor takes a few more. The model
    may be on any device, patched or not, in training mode or not; it runs in eval mode and is left as it was. Call a
    sharded model on every rank with the same batch.

    Args:
        model: A Transformers causal LM, or what PEFT, accelerate, DDP, FSDP or ``torch.compile`` made of one. If an
            object makes its batches itself (sentence-transformers), the model inside it is verified. If a model's head
            takes padded batches only, its base model is verified.
        batch: What a collator returns: ``input_ids``, int32 or int64 ``[batch, length]``, and ``position_ids``, the
            collator's lengths, ``seq_idx`` or a mask of document numbers. ``segment_parents``, integers ``[segments]``,
            come with ``cu_seq_lens_q``. None makes one row of four documents from the vocabulary.
        strict: Raise instead of returning a verification that is not ok.
        max_documents: Replace, and run alone, only this many documents, evenly spread; None takes all.

    Raises:
        PackingNotIsolated: The documents are not isolated and ``strict`` is set; its ``verification`` holds the
            findings. Raised without ``strict`` too if nothing can be verified, for example because the model cannot
            compute the batch. A model that is not patched cannot compute ``segment_parents``.
        NotAModel: There is no Transformers model with token embeddings.
        BadParents: ``segment_parents`` are no tree of the batch's segments.
        BadBatch: The batch has no documents or holds something besides tokens, or ``max_documents`` is not positive.
    """
    inner = transformers_model(model)
    patch: Any = vars(inner).get(MARK)
    patch = patch if patch is not None and used_by(patch) else None  # copy.copy(model) keeps a reverted one's mark
    if hasattr(model, "zero_optimization_stage"):
        model = model.module  # DeepSpeed's engine treats any backward through it as a training step
    elif patch is not None and patch.for_padded_batches:
        model = inner = models(inner)[-1]
    elif makes_its_batches(model):
        model = inner
    _check(inner, max_documents)
    device = token_embeddings(inner).device
    given = example(device, inner) if batch is None else checked(batch, device)
    if patch is None and given.get(PARENTS) is not None:
        raise PackingNotIsolated(
            f"this batch has segment_parents, and this {type(inner).__name__} is not patched. Transformers alone does "
            "not know segments that continue others. Call fa2patch.apply(model) first."
        )
    slices = slices_of(given)
    require_same_on_every_rank(inner, slices)
    unexamined = patch.examination.paused() if patch is not None else contextlib.nullcontext()
    with split_rows.whole(model, inner, patch is not None) as run, left_as_it_was(model), unexamined:
        measured = Measurements(run, inner, patch is not None, given, slices, max_documents)
        measured.measure()
        found = _verification(measured)
    if strict and not found.ok:
        error = PackingNotIsolated(f"{type(inner).__name__}: {found}")
        error.verification = found
        raise error
    return found


def _check(inner: Model, max_documents: int | None) -> None:
    if any(parameter.device.type == "meta" for parameter in inner.parameters()):
        raise PackingNotIsolated(
            "the model's weights are on the meta device, so nothing can be computed. Load them first."
        )
    if max_documents is not None and (not isinstance(max_documents, int) or max_documents < 1):
        raise BadBatch(f"max_documents: expected a number of documents, 1 or more, or None; found {max_documents!r}.")


class _Finding(NamedTuple):
    """What is wrong, in words (empty if nothing is), with the first module that leaks and its class, or None."""

    reason: str
    module: str | None = None
    cls: str | None = None


def _verification(measured: Measurements) -> Verification:
    bound = rounding(measured.dtype) if is_mixture(measured.inner) else 0.0
    near = measured.distance_bound()
    documents = tuple(_document(measured, at) for at, place in enumerate(measured.slices) if place.real)
    reason, module, cls = _finding(measured, bound, near)
    return Verification(not reason, documents, module, cls, reason, bound, near, measured.patched)


def _document(measured: Measurements, at: int) -> Document:
    place, (change, by) = measured.slices[at], measured.moved[at]
    moved_by = None if by is None else measured.number(by)
    parent = measured.number(place.parent) if place.parent >= 0 else None
    gradient, distance = measured.gradients.get(at), measured.distances.get(at)
    return Document(place.row, place.start, place.length, change, moved_by, gradient, distance, parent)


def _finding(measured: Measurements, bound: float, near: float) -> _Finding:
    word, slices = measured.word, measured.slices
    for at, (change, by) in measured.moved.items():
        if change > bound and by is not None:
            source = _named(measured, by) if slices[by].real else "padding"
            what = f"the outputs of {_named(measured, at)} depend on {source}{_OTHER[word]}"
            return _located(measured, at, measured.with_other_tokens(by), bound, what)
    crossing = next((at for at, gradient in measured.gradients.items() if gradient != 0), None)
    if crossing is not None:
        path = measured.tree.path(crossing)
        other = next((one for one, place in enumerate(slices) if place.real and one not in path), crossing)
        what = f"the outputs of {_named(measured, crossing)} send gradients into another {word}{_OTHER[word]}"
        return _located(measured, crossing, measured.with_other_tokens(other), 0.0, what)
    what, at = _without_ancestor(measured, bound)
    if what:
        return _located(measured, at, measured.alone(at), near, what)
    far = {at: distance for at, distance in measured.distances.items() if distance is not None and not distance <= near}
    if far:
        at = max(far, key=lambda one: far[one])
        what = f"{_named(measured, at)} is not computed as when {_ALONE[word]} alone (off by {far[at]:.1e})"
        return _located(measured, at, measured.alone(at), near, what)
    return _Finding(_crossing_labels(measured))


def _located(measured: Measurements, at: int, call: Call, bound: float, what: str) -> _Finding:
    """The first module in which a document is computed differently in ``call`` than in the batch.

    ``call`` is the batch with other tokens, or the document alone: a segment at the end of its path. ``what`` is the
    finding in words, to which the module is added.
    """
    place, shape = measured.slices[at], tuple(call["input_ids"].shape)
    there = place if shape == measured.shape else RowSlice(0, shape[1] - place.length, shape[1], True)
    split = measured.model if isinstance(measured.model, split_rows.WholeRows) else None
    with torch.no_grad():
        one, other = (
            locate.watched(lambda given=given: outputs(measured.model, given), measured.inner, size, place, split)  # type: ignore[misc]
            for given, size, place in ((measured.batch, tuple(measured.shape), place), (call, shape, there))
        )
    name = locate.first_difference(one, other, bound)
    if name is None:
        hidden = "torch.compile hides them, and values do not show what hands on gradients alone"
        return _Finding(f"{what}; in which module could not be seen ({hidden})")
    cls = type(measured.inner.get_submodule(name)).__name__
    meaning = locate.likely_reason(measured.inner, name, measured.patched, tree=measured.word == "segment")
    return _Finding(f"{what}. First in {name or 'the model itself'} ({cls}): {meaning}", name, cls)


def _crossing_labels(measured: Measurements) -> str:
    """The finding if the first label of a slice has a part in the loss; empty if none has, or without labels."""
    if measured.labels is None:
        return ""
    masked, crossing = measured.labels.clone(), []
    for at, place in enumerate(measured.slices):
        if place.real and place.start > 0 and int(masked[place.row, place.start]) != IGNORED_LABEL:
            masked[place.row, place.start] = IGNORED_LABEL
            crossing.append(measured.number(at))
    if not crossing:
        return ""
    with torch.no_grad():
        given = [measured.model(**measured.batch, labels=labels) for labels in (measured.labels, masked)]
    losses = {float(output.loss) for output in given if getattr(output, "loss", None) is not None}
    if len(losses) < 2:
        return ""
    word, second = measured.word, crossing[0]
    return (
        f"labels: the last token of {word} {second - 1} predicts the first of {word} {second}. Set the first label of "
        f"every {word} to -100, as DataCollatorWithFlattening does"
    )


def _named(measured: Measurements, at: int) -> str:
    """A slice as findings name it: ``"document 2"``, or ``"segment 2"`` in a batch with parents."""
    return f"{measured.word} {measured.number(at)}"


def _without_ancestor(measured: Measurements, bound: float) -> tuple[str, int]:
    """What is wrong, in words, and the first segment that does not depend on an ancestor; empty if all do.

    A window, or a state that forgets, may keep a segment from an ancestor rightly. So the path alone decides: nothing
    is said of a segment that does not depend on the ancestor there either.
    """

    def named(at: int, ancestor: int) -> str:
        parent = measured.slices[at].parent == ancestor
        found = _named(measured, ancestor)
        return f"its parent, {found}" if parent else f"{found}, which it continues"

    for (at, ancestor), change in measured.followed.items():
        if change <= bound and measured.dependence_alone(at, ancestor)[0] - change > bound:
            return f"{_named(measured, at)} does not depend on {named(at, ancestor)}", at
    for (at, ancestor), gradient in measured.reached.items():
        if gradient == 0 and measured.dependence_alone(at, ancestor)[1] > 0:
            return f"{_named(measured, at)} sends no gradient to {named(at, ancestor)}", at
    return "", -1
