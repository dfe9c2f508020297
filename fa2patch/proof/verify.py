"""``verify``: a proof on the user's own model that the documents of a packed batch are isolated."""

from __future__ import annotations

import contextlib
import inspect
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..documents.names import LENGTHS
from ..errors import BadBatch, Fa2PatchError, NotAModel, PackingNotIsolated
from ..patch.applying import status
from ..patch.unwrap import transformers_model
from ..probing import locate
from ..probing.batches import PER_TOKEN, Span, checked, example, same_on_every_rank, spans_of, text_tokens
from ..probing.probe import ROUNDING, is_mixture, left_as_it_was, outputs, outputs_and_embeddings
from ..trying import says_nothing

NEAR = {torch.float64: 1e-9, torch.float32: 1e-4}
"""The largest distance between packed and alone, relative to the largest output; 5e-2 in half precision."""


@dataclass(frozen=True)
class Document:
    """The findings about one document.

    Attributes:
        row, start, length: The document's row, first token and number of tokens.
        moved: The largest change of its outputs when tokens outside it are replaced, relative to the largest output
            of the batch.
        moved_by: What changed it most, as an index from 0 into all documents and padding runs; None if nothing did.
        gradient: The largest gradient of its outputs with respect to input embeddings outside it. None if it was left
            out by ``max_documents``.
        distance: The largest difference between its outputs in the batch and alone, relative to the largest output of
            the batch. None if it was left out by ``max_documents``, or if the model fails on its one token alone.
    """

    row: int
    start: int
    length: int
    moved: float = 0.0
    moved_by: int | None = None
    gradient: float | None = None
    distance: float | None = None


@dataclass(frozen=True)
class Verification:
    """The result of :func:`verify`.

    Attributes:
        ok: Whether nothing reaches another document and packed equals alone.
        documents: One :class:`Document` for each document, in order.
        first_leak: The name, in the Transformers model, of the first submodule whose output differs although its input
            is the same. None if nothing differs, or if the module cannot be found.
        leak_class: The name of that submodule's class.
        reason: What is wrong and what it means; empty if nothing is.
        moved_bound: The largest ``moved`` that is accepted: 0, or rounding in a mixture of experts.
        distance_bound: The largest ``distance`` that is accepted.
        patched: Whether the model was patched by fa2patch.
    """

    ok: bool
    documents: tuple[Document, ...]
    first_leak: str | None
    leak_class: str | None
    reason: str
    moved_bound: float
    distance_bound: float
    patched: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON-compatible data."""
        return asdict(self)

    def __str__(self) -> str:
        head = f"{'isolated' if self.ok else 'NOT ISOLATED'}: {len(self.documents)} documents"
        lines = [f"{head}{f'; {self.reason}' if self.reason else ''}"]
        for number, found in enumerate(self.documents, 1):
            gradient = "not asked" if found.gradient is None else f"{found.gradient:.1e}"
            distance = "not asked" if found.distance is None else f"{found.distance:.1e}"
            lines.append(
                f"  document {number} (row {found.row}, token {found.start}, {found.length} long): changed by others "
                f"{found.moved:.1e}, gradient to others {gradient}, from alone {distance}"
            )
        return "\n".join(lines)


def verify(
    model: Any, *, batch: dict[str, Any] | None = None, strict: bool = True, max_documents: int | None = None
) -> Verification:
    """Verify that a model isolates the documents of a packed batch, and find the first module that does not.

    Three things must hold for each document:

    - When its tokens are replaced, the outputs of all other documents stay bit for bit the same. A mixture of experts
      may differ by rounding, because its experts then multiply another number of tokens at a time.
    - The gradient of its outputs with respect to all other input embeddings is exactly zero.
    - Its outputs equal those of the document run alone.

    With ``labels``, the loss must not change when the first label of every document is set to -100.

    The cost is one forward for the batch and, for each document, one forward, one backward and one forward alone.
    ``labels`` add up to three forwards. The model may be on any device, patched or not, in training mode or not; it
    runs in eval mode and is left as it was. Call a sharded model on every rank with the same batch.

    Args:
        model: A Transformers causal LM, or what PEFT, accelerate, DDP, FSDP or ``torch.compile`` made of one.
        batch: What a collator returns: ``input_ids``, int32 or int64 ``[batch, length]``, and ``position_ids``, the
            collator's lengths, ``seq_idx`` or a mask of document numbers. None makes one row of four documents from
            the vocabulary.
        strict: Raise instead of returning a verification that is not ok.
        max_documents: Replace, and run alone, only this many documents, evenly spread; None takes all.

    Raises:
        PackingNotIsolated: The documents are not isolated and ``strict`` is set; its ``verification`` holds the
            findings. Raised without ``strict`` too if nothing can be verified, for example because the model cannot
            compute the batch.
        NotAModel: There is no Transformers model with token embeddings.
        BadBatch: The batch has no documents or holds something besides tokens, or ``max_documents`` is not positive.
    """
    inner = transformers_model(model)
    if hasattr(model, "zero_optimization_stage"):
        model = model.module  # DeepSpeed's engine treats any backward through it as a training step
    if any(parameter.device.type == "meta" for parameter in inner.parameters()):
        raise PackingNotIsolated(
            "the model's weights are on the meta device, so nothing can be computed. Load them first."
        )
    if max_documents is not None and (not isinstance(max_documents, int) or max_documents < 1):
        raise BadBatch(f"max_documents: expected a number of documents, 1 or more, or None; found {max_documents!r}.")
    device = _embedding(inner).device
    given = example(device, inner) if batch is None else checked(batch, device)
    spans = spans_of(given)
    same_on_every_rank(inner, spans)
    patch = status(inner)
    with left_as_it_was(model), patch.examination.paused() if patch is not None else contextlib.nullcontext():
        found = _Run(model, inner, given, spans, max_documents).verification()
    if strict and not found.ok:
        error = PackingNotIsolated(f"{type(inner).__name__}: {found}")
        error.verification = found
        raise error
    return found


def _embedding(inner: Any) -> torch.Tensor:
    try:
        weight = inner.get_input_embeddings().weight
    except (AttributeError, NotImplementedError):
        weight = None
    if not isinstance(weight, torch.Tensor):
        raise NotAModel(
            f"expected a model whose get_input_embeddings() embeds token ids, found {type(inner).__name__}."
        )
    return weight


class _Run:
    def __init__(
        self, model: Any, inner: Any, batch: dict[str, Any], spans: list[Span], max_documents: int | None
    ) -> None:
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
        try:
            with torch.no_grad():
                before = outputs(self.model, self.batch).detach()
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
        scale = float(before.float().abs().max())
        if not 0 < scale < float("inf"):
            raise PackingNotIsolated(
                f"the model's outputs are {'all zero' if scale == 0 else 'not finite'} on this batch, so nothing can "
                "be said about isolation. Load trained weights, or check them."
            )
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
        dtypes = [dtype for dtype in (before.dtype, _embedding(self.inner).dtype) if dtype.is_floating_point]
        # a bfloat16 model may return float32 logits, so the coarser dtype sets the bounds
        bound, near = self._bounds(max(dtypes, key=lambda dtype: torch.finfo(dtype).eps))
        documents = tuple(
            Document(span.row, span.start, span.stop - span.start, *moved[at], gradients.get(at), distances.get(at))
            for at, span in enumerate(self.spans)
            if span.real
        )
        leak, cls, reason = self._reason(moved, gradients, distances, bound, near)
        return Verification(not reason, documents, leak, cls, reason, bound, near, status(self.inner) is not None)

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
        call: dict[str, Any] = {}
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

    def _number(self, at: int) -> int:
        return 1 + sum(span.real for span in self.spans[:at])

    def _named(self, at: int) -> str:
        return f"document {self._number(at)}" if self.spans[at].real else "padding"

    def _located(self, at: int, call: dict[str, Any], bound: float, what: str) -> tuple[str | None, str | None, str]:
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
