"""``verify``: a proof on the user's own model that the documents of a packed batch are isolated."""

from __future__ import annotations

import contextlib
from typing import Any

from .._types import Model
from ..documents.names import PARENTS
from ..errors import BadBatch, PackingNotIsolated
from ..patch.applying import status
from ..probing import whole_rows
from ..probing.batches import checked, example, same_on_every_rank, spans_of
from ..probing.probe import left_as_it_was
from ..upstream.find_models import makes_its_batches, models, token_embeddings, transformers_model
from .compared import Run
from .findings import verification
from .result import Verification


def verify(
    model: Any, *, batch: dict[str, Any] | None = None, strict: bool = True, max_documents: int | None = None
) -> Verification:
    """Verify that a model isolates the documents of a packed batch, and find the first module that does not.

    Three things must hold for each document:

    - When its tokens are replaced, the outputs of all other documents stay bit for bit the same. A mixture of experts
      may differ by rounding, because its experts then multiply another number of tokens at a time.
    - The gradient of its outputs with respect to all other input embeddings is exactly zero.
    - Its outputs equal those of the document run alone.

    With ``segment_parents``, the same holds for segments. Outside a segment then means: outside its path, which is the
    segment and its ancestors. Alone, it is run at the end of its path. Besides, its outputs must depend on each of its
    ancestors, and send a gradient to it, as they do when the path is run alone.

    With ``labels``, the loss must not change when the first label of every document is set to -100.

    The cost is one forward for the batch and, for each document, one forward, one backward and one forward alone.
    ``labels`` add up to three forwards, and a segment that does not depend on an ancestor takes a few more. The model
    may be on any device, patched or not, in training mode or not; it runs in eval mode and is left as it was. Call a
    sharded model on every rank with the same batch.

    Args:
        model: A Transformers causal LM, or what PEFT, accelerate, DDP, FSDP or ``torch.compile`` made of one. Of an
            object that makes its batches itself (sentence-transformers), the model inside is verified. Of a model whose
            head takes padded batches only, the base model is.
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
    patch = status(inner)
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
    spans = spans_of(given)
    same_on_every_rank(inner, spans)
    unexamined = patch.examination.paused() if patch is not None else contextlib.nullcontext()
    with whole_rows.of(model, inner, patch is not None) as run, left_as_it_was(model), unexamined:
        found = verification(Run(run, inner, given, spans, max_documents))
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
