"""``verify``: a proof on the user's own model that the documents of a packed batch are isolated.

It measures the batch, the batch with other tokens in one document, and each document alone. With ``segment_parents``,
segments take the place of documents. Alone, a segment is run at the end of its path.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from .._torch import is_no_verdict
from .._types import Call, Model
from ..binding import used_by
from ..documents.names import IGNORED_LABEL, LABELS, LENGTHS, PARENTS, MediaRow
from ..errors import BadBatch, Fa2PatchError, PackingNotIsolated
from ..upstream import inspecting
from ..upstream.find_models import (
    is_sharded,
    makes_its_batches,
    models,
    stacks_of,
    token_embeddings,
    transformers_model,
)
from ..upstream.forward import proof
from ..upstream.step import MARK
from .inputs import RowSlice, checked, evenly, example, require_same_on_every_rank, slices_of, text_tokens
from .result import Document, Verification
from .runs import Runs, dtypes_saved, left_as_it_was, near, outputs, outputs_and_embeddings, picks, rounding
from .split_rows import whole

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

    If the model's head makes one vector of each document, as a classifier's does, it is the output of each of the
    document's tokens.

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
    if any(parameter.device.type == "meta" for parameter in inner.parameters()):
        raise PackingNotIsolated(
            "the model's weights are on the meta device, so nothing can be computed. Load them first."
        )
    if max_documents is not None and (not isinstance(max_documents, int) or max_documents < 1):
        raise BadBatch(f"max_documents: expected a number of documents, 1 or more, or None; found {max_documents!r}.")
    if stacks_of(inner) is not None:
        found = _pairs(inner, patch, batch, max_documents)
        if strict and not found.ok:
            raise _refused(inner, found)
        return found
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
    with whole(model, inner, patch is not None) as run, left_as_it_was(model), unexamined, proof():
        measured = Measurements(run, inner, patch is not None, given, slices)
        measured.measure(max_documents)
        bound, allowed = measured.change_bound(), measured.distance_bound()
        documents = tuple(measured.document(at) for at, place in enumerate(slices) if place.real)
        reason, module, cls = next(_findings(measured, bound, allowed), _Finding())
        found = Verification(not reason, documents, module, cls, reason, bound, allowed, patch is not None)
    if strict and not found.ok:
        raise _refused(inner, found)
    return found


def _refused(inner: Model, found: Verification) -> PackingNotIsolated:
    error = PackingNotIsolated(f"{type(inner).__name__}: {found}")
    error.verification = found
    return error


def _pairs(inner: Model, patch: Any, batch: Call | None, max_documents: int | None) -> Verification:
    from .pairs import verified  # which only an encoder-decoder needs

    if patch is None:
        raise PackingNotIsolated(
            f"this {type(inner).__name__} is not patched, and Transformers alone computes no packed pairs. Call "
            "fa2patch.apply(model) first."
        )
    with patch.examination.paused(), proof():
        return verified(inner, batch, max_documents)


class Measurements(Runs):
    """How much the documents of one batch depend on each other, and how far they are from what they are alone."""

    def __init__(self, model: Model, inner: Model, patched: bool, batch: Call, slices: list[RowSlice]) -> None:
        # Runs of padding are documents, too. Changes and distances are relative to the largest output of the batch.
        call = {name: value for name, value in batch.items() if name not in LABELS}
        asks = bool(call.get("use_cache")) and patched  # a patched model refuses to make one
        if asks or inspecting.takes(type(inner).forward, "state"):
            call["use_cache"] = False  # as in training: RWKV's cache overwrites what its backward needs
        super().__init__(model, inner, call, slices, batch["input_ids"].shape)
        self.patched, self.labels = patched, batch.get("labels")
        self.generator = torch.Generator().manual_seed(0)
        self.vocabulary = text_tokens(inner)
        self.media = batch if isinstance(batch, MediaRow) else MediaRow({})
        self.before, self.dtype = self._outputs()  # ``[batch, length, ...]``; the coarsest dtype that is computed in
        self.scale = _largest(self.before)
        if not 0 < self.scale < float("inf"):
            raise PackingNotIsolated(
                f"the model's outputs are {'all zero' if self.scale == 0 else 'not finite'} on this batch, so nothing "
                "can be said about isolation. Load trained weights, or check them."
            )
        # The largest change of a slice's outputs, and the slice with other tokens that caused it.
        self.moved: dict[int, tuple[float, int | None]] = {at: (0.0, None) for at in range(len(slices))}
        self.gradients: dict[int, float] = {}  # the largest from a document's outputs to embeddings outside its path
        self.distances: dict[int, float | None] = {}  # from alone; None if the model fails on its one token
        self.followed: dict[tuple[int, int], float] = {}  # by (descendant, segment): how much the descendant moves
        self.reached: dict[tuple[int, int], float] = {}  # by (segment, ancestor): the largest gradient to the ancestor

    def measure(self, most: int | None) -> None:
        real = [at for at, place in enumerate(self.slices) if place.real]
        real = [real[one] for one in evenly(len(real), most)]
        for at in real + [at for at, place in enumerate(self.slices) if not place.real]:
            place = self.slices[at]
            output, leaf = outputs_and_embeddings(self.model, self.inner, self.with_other_tokens(at), self.slices)
            (gradient,), after = self.gradients_to([place.of(output)], [leaf]), output.detach()
            del output  # and its graph
            if place.real:
                self._require_seen(at, after, gradient)
            for other, theirs in enumerate(self.slices):
                if not theirs.real or other == at:
                    continue
                change = _largest(theirs.of(after) - theirs.of(self.before)) / self.scale
                if at in self.tree.path(other):
                    self.followed[other, at] = change
                else:
                    self.moved[other] = max(self.moved[other], (change, at), key=lambda found: found[0])
            for one in self.tree.path(at):
                if one != at:
                    self.reached[at, one] = _largest(self.slices[one].of(gradient))
                self.slices[one].of(gradient).zero_()
            if place.real:
                self.gradients[at] = _largest(gradient)
                self.distances[at] = self._distance(at)

    def _require_seen(self, at: int, after: torch.Tensor, gradient: torch.Tensor) -> None:
        place, where = self.slices[at], f"the {self.word} at row {self.slices[at].row}, token {self.slices[at].start}"
        if not _largest(place.of(gradient)) > 0:
            raise PackingNotIsolated(
                f"the outputs of {where} send no gradient to its own embeddings, so nothing can be said about others'. "
                "Is some part of the model detached?"
            )
        if torch.equal(place.of(after), place.of(self.before)):
            raise PackingNotIsolated(
                f"other tokens in {where} do not even change its own outputs, so nothing can be said about others'. "
                "Are the model's weights loaded?"
            )

    def number(self, at: int) -> int:
        return sum(place.real for place in self.slices[: at + 1]) if self.slices[at].real else 0  # 0 is padding

    def named(self, at: int) -> str:
        return f"{self.word} {self.number(at)}" if self.slices[at].real else "padding"

    def continued(self, at: int, ancestor: int) -> str:
        found = self.named(ancestor)
        return f"its parent, {found}" if self.slices[at].parent == ancestor else f"{found}, which it continues"

    def document(self, at: int) -> Document:
        place, (change, by) = self.slices[at], self.moved[at]
        moved_by = None if by is None else self.number(by)
        parent = self.number(place.parent) if place.parent >= 0 else None
        gradient, distance = self.gradients.get(at), self.distances.get(at)
        return Document(place.row, place.start, place.length, change, moved_by, gradient, distance, parent)

    def _outputs(self) -> tuple[torch.Tensor, torch.dtype]:
        try:
            # with gradients, as when tokens are exchanged, because a call without them may get another kernel
            with dtypes_saved() as dtypes:
                found = outputs_and_embeddings(self.model, self.inner, self.call, self.slices)[0].detach()
            # Labels are tried, too, because their loss is compared later.
            if self.labels is not None:
                with torch.no_grad():
                    self.model(**self.call, labels=self.labels)
        except Exception as error:
            if is_no_verdict(error) or isinstance(error, Fa2PatchError):
                raise
            raise PackingNotIsolated(
                f"the model cannot compute this batch ({type(error).__name__}: {error}). Are all token ids and labels "
                "integers of its vocabulary?"
            ) from error
        dtypes |= {found.dtype, token_embeddings(self.inner).dtype}
        return found, max((one for one in dtypes if one.is_floating_point), key=lambda one: torch.finfo(one).eps)

    def with_other_tokens(self, at: int) -> Call:
        ids: torch.Tensor = self.call["input_ids"].clone()
        old = self.slices[at].of(ids)
        drawn = torch.randint(len(self.vocabulary) - 1, old.shape, generator=self.generator)
        new = self.vocabulary[drawn].to(old)
        new = torch.where(new == old, self.vocabulary[-1].to(old), new)
        if self.media.parts:  # placeholders must stay as many as there are pictures
            new = torch.where(torch.isin(old, self.vocabulary.to(old)), new, old)
        old.copy_(new)
        return {**self.call, "input_ids": ids}

    def alone(self, at: int, call: Call) -> Call:
        given = {name: value for name, value in call.items() if name not in self.media.parts}
        own = {**super().alone(at, given), **self.media.of(at)}
        if self.patched:
            return own
        # An unpatched model gets a mask of ones in the place of lengths.
        own = {name: value for name, value in own.items() if name not in LENGTHS}
        return {**own, "attention_mask": torch.ones_like(own["input_ids"])}

    def _distance(self, at: int) -> float | None:
        try:
            with torch.no_grad():
                alone = outputs(self.model, self.alone(at, self.call))
        except Exception as error:
            if is_no_verdict(error) or isinstance(error, Fa2PatchError):
                raise
            if self.tree.offsets[at] + self.slices[at].length > 1:
                raise PackingNotIsolated(
                    f"the model computes {self.named(at)} in the row, and not alone "
                    f"({type(error).__name__}: {error}), so the two cannot be compared. Do its position_ids start at 0?"
                ) from error
            return None  # some models fail on one token alone, for example Falcon's eager attention
        place = self.slices[at]
        return _largest(alone[0, -place.length :] - place.of(self.before)) / self.scale

    def change_bound(self) -> float:
        # It is 0, or rounding where tokens pick experts, which takes two runs to know. They are left out where no
        # change is as small as that, but every rank of a sharded model must run them.
        changes = [*(change for change, _ in self.moved.values()), *self.followed.values()]
        if not any(0 < change <= rounding(self.dtype) for change in changes) and not is_sharded(self.inner):
            return 0.0
        longest = max(range(len(self.slices)), key=lambda at: self.slices[at].length)
        runs = (partial(self.run, call) for call in (self.call, self.with_other_tokens(longest)))
        return rounding(self.dtype) if picks(runs, math.prod(self.shape)) else 0.0

    def distance_bound(self) -> float:
        # A layer may compute in float32 inside of float64 and save nothing of it for a backward. Then a document is as
        # far from itself in a batch whose rows all hold it, where nothing but rounding differs. This is measured where
        # float64's bound is not held.
        bound = near(self.dtype)
        far = [at for at, distance in self.distances.items() if distance is not None and distance > bound]
        if self.dtype != torch.float64 or self.media.parts:
            return bound
        return min(near(torch.float32), max([bound, *(10 * self._rounding(at) for at in far)]))

    def _rounding(self, at: int) -> float:
        # How far a document alone is from itself in a batch of about as many tokens that repeats it.
        call, size = self.alone(at, self.call), self.tree.offsets[at] + self.slices[at].length
        rows = max(2, math.prod(self.shape) // size)
        repeated = {
            name: torch.cat([value] * rows, -2) if isinstance(value, torch.Tensor) and value.dim() > 1 else value
            for name, value in call.items()
        }
        if self.patched:
            ends = torch.arange(rows + 1, dtype=torch.int32, device=call["input_ids"].device) * size
            repeated.update(cu_seq_lens_q=ends, cu_seq_lens_k=ends)
        with torch.no_grad():
            return _largest(outputs(self.model, repeated) - outputs(self.model, call)) / self.scale

    def dependence_alone(self, at: int, ancestor: int) -> tuple[float, float]:
        # How the outputs of a segment at the end of its path alone change with an ancestor, and the gradient to it.
        length, start = self.slices[at].length, self.tree.offsets[ancestor]
        output, leaf = outputs_and_embeddings(self.model, self.inner, self.alone(at, self.call))
        own = output[0, -length:]
        (found,) = self.gradients_to([own], [leaf])
        with torch.no_grad():
            after = outputs(self.model, self.alone(at, self.with_other_tokens(ancestor)))
        change = _largest(after[0, -length:] - own) / self.scale
        return change, _largest(found[0, start : start + self.slices[ancestor].length])


def _largest(values: torch.Tensor) -> float:
    found = float(values.detach().float().abs().max()) if values.numel() else 0.0
    return found if found == found else float("inf")  # infinite for NaN


class _Finding(NamedTuple):
    reason: str = ""  # empty if nothing is wrong
    module: str | None = None  # the first one that leaks
    cls: str | None = None


def _findings(measured: Measurements, bound: float, allowed: float) -> Iterator[_Finding]:
    # The most telling come first. The module of each is looked for only when the finding is asked for.
    word, named = measured.word, measured.named
    for at, (change, by) in measured.moved.items():
        if change > bound and by is not None:
            what = f"the outputs of {named(at)} depend on {named(by)}{_OTHER[word]}"
            yield _located(measured, at, measured.with_other_tokens(by), bound, what)
    for at, gradient in measured.gradients.items():
        if gradient != 0:
            path = measured.tree.path(at)
            others = (one for one, place in enumerate(measured.slices) if place.real and one not in path)
            what = f"the outputs of {named(at)} send gradients into another {word}{_OTHER[word]}"
            yield _located(measured, at, measured.with_other_tokens(next(others, at)), 0.0, what)
    # A window, or a state that forgets, may rightly keep a segment from an ancestor. So the path alone decides: nothing
    # is said of a segment that does not depend on the ancestor there either.
    for (at, ancestor), change in measured.followed.items():
        if change <= bound and measured.dependence_alone(at, ancestor)[0] - change > bound:
            what = f"{named(at)} does not depend on {measured.continued(at, ancestor)}"
            yield _located(measured, at, measured.alone(at, measured.call), allowed, what)
    for (at, ancestor), gradient in measured.reached.items():
        if gradient == 0 and measured.dependence_alone(at, ancestor)[1] > 0:
            what = f"{named(at)} sends no gradient to {measured.continued(at, ancestor)}"
            yield _located(measured, at, measured.alone(at, measured.call), allowed, what)
    far = {at: each for at, each in measured.distances.items() if each is not None and each > allowed}
    if far:
        at = max(far, key=lambda one: far[one])
        what = f"{named(at)} is not computed as when {_ALONE[word]} alone (off by {far[at]:.1e})"
        yield _located(measured, at, measured.alone(at, measured.call), allowed, what)
    yield _Finding(_crossing_labels(measured))


def _located(measured: Measurements, at: int, call: Call, bound: float, what: str) -> _Finding:
    # ``call`` is the batch with other tokens, or the document alone: a segment at the end of its path.
    with torch.no_grad():
        found = measured.first_leak(at, call, None, bound, measured.patched)
    if found is None:
        hidden = "torch.compile hides them, and values do not show what hands on gradients alone"
        return _Finding(f"{what}; in which module could not be seen ({hidden})")
    name, cls, meaning = found
    return _Finding(f"{what}. First in {name or 'the model itself'} ({cls}): {meaning}", name, cls)


def _crossing_labels(measured: Measurements) -> str:
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
        given = [measured.model(**measured.call, labels=labels) for labels in (measured.labels, masked)]
    losses = {float(output.loss) for output in given if getattr(output, "loss", None) is not None}
    if len(losses) < 2:
        return ""
    word, second = measured.word, crossing[0]
    return (
        f"labels: the last token of {word} {second - 1} predicts the first of {word} {second}. Set the first label of "
        f"every {word} to -100, as DataCollatorWithFlattening does"
    )
