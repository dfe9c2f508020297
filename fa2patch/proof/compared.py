"""The runs that ``verify`` compares: the batch, the batch with other tokens in one document, each document alone."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from .._types import Call, Model
from ..documents.names import LENGTHS
from ..errors import Fa2PatchError, NotAModel, PackingNotIsolated
from ..patch.applying import status
from ..probing import locate
from ..probing.batches import PER_TOKEN, Span, text_tokens
from ..probing.probe import ROUNDING, is_mixture, outputs, outputs_and_embeddings
from ..trying import says_nothing
from .result import Document, Verification

NEAR = {torch.float64: 1e-9, torch.float32: 1e-4}
"""The largest distance between packed and alone, relative to the largest output; 5e-2 in half precision."""


def embedding(inner: Model) -> torch.Tensor:
    """The weights of a model's token embeddings, ``[vocabulary, hidden]``.

    Raises:
        NotAModel: There are none.
    """
    try:
        weight = inner.get_input_embeddings().weight
    except (AttributeError, NotImplementedError):
        weight = None
    if not isinstance(weight, torch.Tensor):
        raise NotAModel(
            f"expected a model whose get_input_embeddings() embeds token ids, found {type(inner).__name__}."
        )
    return weight


class Run:
    """The runs of one model on one batch that :func:`fa2patch.verify` compares."""

    def __init__(self, model: Model, inner: Model, batch: Call, spans: list[Span], max_documents: int | None) -> None:
        self.model, self.inner = model, inner
        self.labels = batch.get("labels")
        self.batch = {name: value for name, value in batch.items() if name not in ("labels", "shift_labels")}
        if "state" in inspect.signature(type(inner).forward).parameters:
            self.batch["use_cache"] = False  # as in training: RWKV's cache overwrites what its backward needs
        self.spans = spans
        self.chosen = _spread([at for at, span in enumerate(spans) if span.real], max_documents)
        self.fill = [at for at, span in enumerate(spans) if not span.real]
        self.generator = torch.Generator().manual_seed(0)
        self.vocabulary = text_tokens(inner)

    def verification(self) -> Verification:
        """Run everything that is compared, and say what was found.

        Raises:
            PackingNotIsolated: The model cannot compute the batch, or its outputs say nothing about isolation.
        """
        before = self._outputs()
        scale = self._scale(before)
        moved: dict[int, tuple[float, int | None]] = {at: (0.0, None) for at in range(len(self.spans))}
        gradients: dict[int, float] = {}
        distances: dict[int, float | None] = {}
        for at in self.chosen + self.fill:
            after, gradient = self._exchanged(at)
            for other, span in enumerate(self.spans):
                if span.real and other != at:
                    change = _largest(span.of(after) - span.of(before)) / scale
                    moved[other] = max(moved[other], (change, at), key=lambda found: found[0])
            if self.spans[at].real:
                self._check_power(at, after, before)
                gradients[at] = gradient
                distances[at] = self._distance(at, before, scale)
            del after
        dtypes = [dtype for dtype in (before.dtype, embedding(self.inner).dtype) if dtype.is_floating_point]
        # a bfloat16 model may return float32 logits, so the coarser dtype sets the bounds
        bound, near = self._bounds(max(dtypes, key=lambda dtype: torch.finfo(dtype).eps))
        documents = tuple(
            Document(*span.place, *self._moved(*moved[at]), gradients.get(at), distances.get(at))
            for at, span in enumerate(self.spans)
            if span.real
        )
        leak, cls, reason = self._reason(moved, gradients, distances, bound, near)
        return Verification(not reason, documents, leak, cls, reason, bound, near, status(self.inner) is not None)

    def _outputs(self) -> torch.Tensor:
        """The outputs of the batch as it is. Its labels are tried too, as their loss is compared later."""
        try:
            with torch.no_grad():
                found = outputs(self.model, self.batch).detach()
                if self.labels is not None:
                    self.model(**self.batch, labels=self.labels)
        except Fa2PatchError:
            raise
        except Exception as error:
            if says_nothing(error):
                raise
            raise PackingNotIsolated(
                f"the model cannot compute this batch ({type(error).__name__}: {error}). Are all token ids and labels "
                "integers of its vocabulary?"
            ) from error
        return found

    @staticmethod
    def _scale(before: torch.Tensor) -> float:
        """The largest output, which differences are divided by."""
        scale = float(before.float().abs().max())
        if not 0 < scale < float("inf"):
            raise PackingNotIsolated(
                f"the model's outputs are {'all zero' if scale == 0 else 'not finite'} on this batch, so nothing can "
                "be said about isolation. Load trained weights, or check them."
            )
        return scale

    def _bounds(self, dtype: torch.dtype) -> tuple[float, float]:
        mixture = is_mixture(self.inner)
        return ROUNDING.get(dtype, 1e-2) if mixture else 0.0, NEAR.get(dtype, 5e-2)

    def _exchanged_ids(self, at: int) -> torch.Tensor:
        ids: torch.Tensor = self.batch["input_ids"].clone()
        old = self.spans[at].of(ids)
        drawn = torch.randint(len(self.vocabulary) - 1, old.shape, generator=self.generator)
        new = self.vocabulary[drawn].to(old)
        old.copy_(torch.where(new == old, self.vocabulary[-1].to(old), new))
        return ids

    def _exchanged(self, at: int) -> tuple[torch.Tensor, float]:
        """The outputs with other tokens in one document, and the largest gradient from it to the rest of the batch."""
        span = self.spans[at]
        output, leaf = outputs_and_embeddings(
            self.model, self.inner, {**self.batch, "input_ids": self._exchanged_ids(at)}
        )
        own = span.of(output).float()
        directions = torch.randn(own.shape, generator=self.generator).to(own)
        (gradient,) = torch.autograd.grad((own * directions).sum(), leaf)
        inside = _largest(span.of(gradient))
        if span.real and not inside > 0:
            raise PackingNotIsolated(
                f"the outputs of the document at row {span.row}, token {span.start} send no gradient to its own "
                "embeddings, so nothing can be said about others'. Is some part of the model detached?"
            )
        rest = gradient.clone()
        span.of(rest).zero_()
        return output.detach(), _largest(rest)

    def _check_power(self, at: int, after: torch.Tensor, before: torch.Tensor) -> None:
        span = self.spans[at]
        if torch.equal(span.of(after), span.of(before)):
            raise PackingNotIsolated(
                f"other tokens in the document at row {span.row}, token {span.start} do not even change its own "
                "outputs, so nothing can be said about others'. Are the model's weights loaded?"
            )

    def _alone(self, at: int) -> dict[str, Any]:
        """The forward arguments for one document alone, with a mask of ones.

        A patched model gets ``cu_seq_lens_*`` instead of the mask, so that a kernel computes the document. As a dense
        batch it would run upstream's code, where Gemma 2's sdpa has no softcap and GPT-2's flash attention no float32.
        """
        span = self.spans[at]
        call: Call = {}
        for name, value in self.batch.items():
            if name in LENGTHS:
                continue
            if name in PER_TOKEN and isinstance(value, torch.Tensor):
                row = span.row if value.shape[-2:-1] not in ((), (1,)) else 0
                value = value[None] if value.dim() == 1 else value
                value = value[..., row : row + 1, span.start : span.stop]
            call[name] = value
        if status(self.inner) is None:
            call["attention_mask"] = torch.ones_like(call["input_ids"])
        else:
            call.pop("attention_mask", None)
            length = span.stop - span.start
            cu = torch.tensor([0, length], dtype=torch.int32, device=call["input_ids"].device)
            call.update(cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=length, max_length_k=length)
        return call

    def _distance(self, at: int, before: torch.Tensor, scale: float) -> float | None:
        try:
            with torch.no_grad():
                alone = outputs(self.model, self._alone(at))
        except Exception as error:
            if says_nothing(error) or isinstance(error, Fa2PatchError):
                raise
            if self.spans[at].stop - self.spans[at].start > 1:
                raise
            return None  # some models fail on one token alone, for example Falcon's eager attention
        return _largest(alone[0] - self.spans[at].of(before)) / scale

    def _reason(
        self,
        moved: dict[int, tuple[float, int | None]],
        gradients: dict[int, float],
        distances: dict[int, float | None],
        bound: float,
        near: float,
    ) -> tuple[str | None, str | None, str]:
        """The first module that leaks, its class, and the finding in words."""
        worst = max(moved, key=lambda at: moved[at][0])
        change, by = moved[worst]
        if change > bound and by is not None:
            what = f"the outputs of document {self._number(worst)} depend on {self._named(by)}"
            return self._located(worst, {**self.batch, "input_ids": self._exchanged_ids(by)}, bound, what)
        crossing = {at: gradient for at, gradient in gradients.items() if gradient != 0}
        if crossing:
            at = next(iter(crossing))
            other = next((one for one, span in enumerate(self.spans) if span.real and one != at), at)
            what = f"the outputs of document {self._number(at)} send gradients into another document"
            return self._located(at, {**self.batch, "input_ids": self._exchanged_ids(other)}, 0.0, what)
        far = {at: distance for at, distance in distances.items() if distance is not None and not distance <= near}
        if far:
            at = max(far, key=lambda one: far[one])
            what = f"document {self._number(at)} is not computed as when it is alone (off by {far[at]:.1e})"
            return self._located(at, self._alone(at), near, what)
        crossed = self._crossing_labels()
        return (None, None, crossed) if crossed else (None, None, "")

    def _moved(self, change: float, by: int | None) -> tuple[float, int | None]:
        if by is None:
            return change, None
        return change, self._number(by) if self.spans[by].real else 0

    def _number(self, at: int) -> int:
        return 1 + sum(span.real for span in self.spans[:at])

    def _named(self, at: int) -> str:
        return f"document {self._number(at)}" if self.spans[at].real else "padding"

    def _located(self, at: int, call: Call, bound: float, what: str) -> tuple[str | None, str | None, str]:
        span = self.spans[at]
        shape = tuple(self.batch["input_ids"].shape)
        here = locate.Watch(self.inner, shape, span.row, span.start, span.stop)
        if call["input_ids"].shape == shape:
            there = locate.Watch(self.inner, shape, span.row, span.start, span.stop)
        else:
            there = locate.Watch(self.inner, tuple(call["input_ids"].shape), 0, 0, span.stop - span.start)
        with torch.no_grad():
            for watch, given in ((here, self.batch), (there, call)):
                with watch.watching():
                    outputs(self.model, given)
        name = locate.first_difference(here, there, bound)
        if name is None:
            hidden = "torch.compile hides them, and values do not show what hands on gradients alone"
            return None, None, f"{what}; in which module could not be seen ({hidden})"
        cls = type(self.inner.get_submodule(name)).__name__
        meaning = locate.meaning(self.inner, name, status(self.inner) is not None)
        return name, cls, f"{what}. First in {name or 'the model itself'} ({cls}): {meaning}"

    def _crossing_labels(self) -> str:
        if self.labels is None:
            return ""
        masked = self.labels.clone()
        crossing = None
        for at, span in enumerate(self.spans):
            if span.start > 0 and span.real:
                if crossing is None and int(masked[span.row, span.start]) != -100:
                    crossing = at
                masked[span.row, span.start] = -100
        if crossing is None:
            return ""
        with torch.no_grad():
            given = [self.model(**self.batch, labels=labels) for labels in (self.labels, masked)]
        losses = {float(output.loss) for output in given if getattr(output, "loss", None) is not None}
        if len(losses) < 2:
            return ""
        number = self._number(crossing)
        return (
            f"labels: the last token of document {number - 1} predicts the first of document {number}. Set the first "
            "label of every document to -100, as DataCollatorWithFlattening does"
        )


def _largest(values: torch.Tensor) -> float:
    """The largest absolute value; infinity if a value is NaN."""
    found = float(values.detach().float().abs().max()) if values.numel() else 0.0
    return found if found == found else float("inf")


def _spread(numbers: list[int], most: int | None) -> list[int]:
    if most is None or len(numbers) <= most:
        return numbers
    return [numbers[round(i * (len(numbers) - 1) / max(most - 1, 1))] for i in range(most)]
