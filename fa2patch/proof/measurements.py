"""What ``verify`` measures: the batch, the batch with other tokens in one document, each document alone.

With ``segment_parents``, segments take the place of documents. Alone, a segment is run at the end of its path.
"""

from __future__ import annotations

import torch

from .._torch import is_no_verdict
from .._types import Call, Model
from ..comparison import gradients
from ..documents.names import LABELS, LENGTHS, MediaRow
from ..documents.trees import Tree
from ..errors import Fa2PatchError, PackingNotIsolated
from ..upstream import inspecting
from ..upstream.find_models import token_embeddings
from .inputs import RowSlice, on_its_own, text_tokens
from .running import dtypes_saved, near, outputs, outputs_and_embeddings
from .split_rows import WholeRows


class Measurements:
    """How much the documents of one batch depend on each other, and how far they are from what they are alone.

    A document, segment or run of padding is named by its index in ``slices``. Changes and distances are relative to
    ``scale``.

    Attributes:
        batch: the batch without labels.
        slices: the documents, or segments, and runs of padding in it.
        tree: the slices and what each continues. A document is a root without children.
        word: what the slices are called, ``"segment"`` if one of them has a parent, else ``"document"``.
        before: the outputs of the batch as it is, ``[batch, length, ...]``.
        dtype: the coarsest dtype that the outputs are computed in.
        scale: the largest absolute value in ``before``.
        moved: for each slice the largest change of its outputs, and the slice with other tokens that caused it.
        gradients: for each chosen document the largest gradient from its outputs to embeddings outside its path.
        distances: for each chosen document how far its outputs are from those of the document alone; None if the model
            fails on its one token.
        followed: for each chosen segment and each of its descendants ``(descendant, segment)`` the change of the
            descendant's outputs.
        reached: for each chosen segment and each of its ancestors ``(segment, ancestor)`` the largest gradient from the
            segment's outputs to the ancestor's embeddings.

    Raises:
        PackingNotIsolated: the model cannot compute the batch, or its outputs are all zero or not finite.
    """

    def __init__(
        self, model: Model, inner: Model, patched: bool, batch: Call, slices: list[RowSlice], max_documents: int | None
    ) -> None:
        self.model, self.inner, self.patched = model, inner, patched
        self.labels = batch.get("labels")
        self.batch = {name: value for name, value in batch.items() if name not in LABELS}
        asks = bool(self.batch.get("use_cache")) and patched  # a patched model refuses to make one
        if asks or inspecting.takes(type(inner).forward, "state"):
            self.batch["use_cache"] = False  # as in training: RWKV's cache overwrites what its backward needs
        self.slices, self.shape = slices, batch["input_ids"].shape
        self.tree = Tree([place.length for place in slices], [place.parent for place in slices], torch.device("cpu"))
        self.word = "segment" if any(place.parent >= 0 for place in slices) else "document"
        real = [at for at, place in enumerate(slices) if place.real]
        self.chosen = _spread(real, max_documents) + [at for at, place in enumerate(slices) if not place.real]
        self.generator = torch.Generator().manual_seed(0)
        self.vocabulary = text_tokens(inner)
        self.media = batch if isinstance(batch, MediaRow) else MediaRow({})
        self.before, self.dtype = self._outputs()
        self.scale = self._scale()
        self.moved: dict[int, tuple[float, int | None]] = {at: (0.0, None) for at in range(len(slices))}
        self.gradients: dict[int, float] = {}
        self.distances: dict[int, float | None] = {}
        self.followed: dict[tuple[int, int], float] = {}
        self.reached: dict[tuple[int, int], float] = {}

    def measure(self) -> None:
        """Exchange and run alone one document after another.

        Raises:
            PackingNotIsolated: the outputs of a document do not depend on its own tokens.
        """
        for at in self.chosen:
            after, gradient = self._exchanged(at)
            for other, place in enumerate(self.slices):
                if not place.real or other == at:
                    continue
                change = _largest(place.of(after) - place.of(self.before)) / self.scale
                if at in self.tree.path(other):
                    self.followed[other, at] = change
                else:
                    self.moved[other] = max(self.moved[other], (change, at), key=lambda found: found[0])
            if self.slices[at].real:
                self._check_power(at, after)
                self.gradients[at] = gradient
                self.distances[at] = self._distance(at)
            del after

    def number(self, at: int) -> int:
        """The number of a document, counted from 1; 0 for padding."""
        return sum(place.real for place in self.slices[: at + 1]) if self.slices[at].real else 0

    def _outputs(self) -> tuple[torch.Tensor, torch.dtype]:
        """The outputs of the batch as it is, and the dtype. Labels are tried too, as their loss is compared later."""
        try:
            # with gradients, as when tokens are exchanged, because a call without them may get another kernel
            with dtypes_saved() as dtypes:
                found = outputs_and_embeddings(self.model, self.inner, self.batch)[0].detach()
            if self.labels is not None:
                with torch.no_grad():
                    self.model(**self.batch, labels=self.labels)
        except Exception as error:
            if is_no_verdict(error) or isinstance(error, Fa2PatchError):
                raise
            raise PackingNotIsolated(
                f"the model cannot compute this batch ({type(error).__name__}: {error}). Are all token ids and labels "
                "integers of its vocabulary?"
            ) from error
        dtypes |= {found.dtype, token_embeddings(self.inner).dtype}
        return found, max((one for one in dtypes if one.is_floating_point), key=lambda one: torch.finfo(one).eps)

    def _scale(self) -> float:
        scale = float(self.before.float().abs().max())
        if not 0 < scale < float("inf"):
            raise PackingNotIsolated(
                f"the model's outputs are {'all zero' if scale == 0 else 'not finite'} on this batch, so nothing can "
                "be said about isolation. Load trained weights, or check them."
            )
        return scale

    def with_other_tokens(self, at: int) -> Call:
        """The batch with other tokens in one slice."""
        ids: torch.Tensor = self.batch["input_ids"].clone()
        old = self.slices[at].of(ids)
        drawn = torch.randint(len(self.vocabulary) - 1, old.shape, generator=self.generator)
        new = self.vocabulary[drawn].to(old)
        new = torch.where(new == old, self.vocabulary[-1].to(old), new)
        if self.media.parts:  # placeholders must stay as many as there are pictures
            new = torch.where(torch.isin(old, self.vocabulary.to(old)), new, old)
        old.copy_(new)
        return {**self.batch, "input_ids": ids}

    def _exchanged(self, at: int) -> tuple[torch.Tensor, float]:
        """The outputs with other tokens in one document, and the largest gradient to what is not on its path."""
        place = self.slices[at]
        output, leaf = outputs_and_embeddings(self.model, self.inner, self.with_other_tokens(at))
        found = self._gradient(place.of(output), leaf)
        inside = _largest(place.of(found))
        if place.real and not inside > 0:
            raise PackingNotIsolated(
                f"the outputs of the {self.word} at row {place.row}, token {place.start} send no gradient to its own "
                "embeddings, so nothing can be said about others'. Is some part of the model detached?"
            )
        rest = found.clone()
        for one in self.tree.path(at):
            if one != at:
                self.reached[at, one] = _largest(self.slices[one].of(found))
            self.slices[one].of(rest).zero_()
        return output.detach(), _largest(rest)

    def _gradient(self, own: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
        """The gradient of a random sum of outputs."""
        (found,) = gradients([own], [leaf])
        return self.model.summed(found) if isinstance(self.model, WholeRows) else found

    def _check_power(self, at: int, after: torch.Tensor) -> None:
        place = self.slices[at]
        if torch.equal(place.of(after), place.of(self.before)):
            raise PackingNotIsolated(
                f"other tokens in the {self.word} at row {place.row}, token {place.start} do not even change its own "
                "outputs, so nothing can be said about others'. Are the model's weights loaded?"
            )

    def alone(self, at: int, batch: Call | None = None) -> Call:
        """The arguments for one document of a batch alone, or for a segment's path; None for the batch as it is.

        An unpatched model gets a mask of ones in the place of lengths.
        """
        path = [self.slices[one] for one in self.tree.path(at)]
        given = {name: value for name, value in (batch or self.batch).items() if name not in self.media.parts}
        call = {**on_its_own(given, path, self.shape), **self.media.of(at)}
        if self.patched:
            return call
        call = {name: value for name, value in call.items() if name not in LENGTHS}
        return {**call, "attention_mask": torch.ones_like(call["input_ids"])}

    def _distance(self, at: int) -> float | None:
        try:
            with torch.no_grad():
                alone = outputs(self.model, self.alone(at))
        except Exception as error:
            if is_no_verdict(error) or isinstance(error, Fa2PatchError):
                raise
            if self.tree.offsets[at] + self.slices[at].length > 1:
                raise PackingNotIsolated(
                    f"the model computes {self.word} {self.number(at)} in the row, and not alone "
                    f"({type(error).__name__}: {error}), so the two cannot be compared. Do its position_ids start at 0?"
                ) from error
            return None  # some models fail on one token alone, for example Falcon's eager attention
        place = self.slices[at]
        return _largest(alone[0, -place.length :] - place.of(self.before)) / self.scale

    def distance_bound(self) -> float:
        """The largest distance that is accepted.

        A layer may compute in float32 inside of float64 and save nothing of it for a backward. Then a document is as
        far from itself in a batch whose rows all hold it, where nothing but rounding differs. This is measured where
        float64's bound is not held. The bound is never larger than that of float32.
        """
        bound = near(self.dtype)
        far = [at for at, distance in self.distances.items() if distance is not None and distance > bound]
        if self.dtype != torch.float64 or self.media.parts:
            return bound
        return min(near(torch.float32), max([bound, *(10 * self._rounding(at) for at in far)]))

    def _rounding(self, at: int) -> float:
        """How far the outputs of a document alone are from those in a batch of about as many tokens that repeats it."""
        call, size = self.alone(at), self.tree.offsets[at] + self.slices[at].length
        rows = max(2, self.shape.numel() // size)
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
        """How the outputs of a segment at the end of its path alone change with an ancestor, and the gradient to it."""
        length, start = self.slices[at].length, self.tree.offsets[ancestor]
        output, leaf = outputs_and_embeddings(self.model, self.inner, self.alone(at))
        own = output[0, -length:]
        found = self._gradient(own, leaf)
        with torch.no_grad():
            after = outputs(self.model, self.alone(at, self.with_other_tokens(ancestor)))
        change = _largest(after[0, -length:] - own) / self.scale
        return change, _largest(found[0, start : start + self.slices[ancestor].length])


def _largest(values: torch.Tensor) -> float:
    """The largest absolute value; infinity if a value is NaN."""
    found = float(values.detach().float().abs().max()) if values.numel() else 0.0
    return found if found == found else float("inf")


def _spread(numbers: list[int], most: int | None) -> list[int]:
    if most is None or len(numbers) <= most:
        return numbers
    return [numbers[round(i * (len(numbers) - 1) / max(most - 1, 1))] for i in range(most)]
