"""Heads that compute one vector or one softmax over a whole row. They are refused, or given padded rows."""

from __future__ import annotations

import re

import torch

from ..._types import Model
from ...errors import PackingNotIsolated, UnsupportedModel
from .. import inspecting
from ..looked import Looked
from ..step import Step
from . import pooling
from .trait import Trait

_ROW_ARGUMENTS = (
    "start_positions", "end_positions", "mc_token_ids", "mc_labels", "next_sentence_label", "sentence_order_label",
)  # fmt: skip
"""Arguments with a position in each row, or a label for each row."""

_CHOICES = "num_choices"
"""The variable for the number of rows of one question in the forwards of all Transformers versions."""

_COMPARES = "logits_per_text"
"""The variable for the similarity of texts and images in the forwards of CLIP and similar models."""

_CLASSIFIES = "problem_type"
"""The config entry by which a forward chooses the loss for one label per row. Token classifiers do not read it."""

_READS_ALL = re.compile("SequenceClassification|CausalLM|LMHead|MaskedLM|TokenClassification")


class HeadOfRows(Trait):
    """Refuse a head that computes one result per row, and packed batches for such a head.

    Where padded batches are computed packed, the head is given padded hidden states, and its model is not refused.
    """

    of_head = True

    def refuses(self, model: Looked, found: str) -> None:
        raise UnsupportedModel(
            f"{model} {found}, and a packed row holds many documents. Nothing was patched. Train it padded: "
            "fa2patch.apply(model, padded_batches=True) computes its padded batches packed, unless the head reads "
            "padding, too (a softmax over the row, as for question answering). Or train it without that head."
        )

    def before(self, step: Step, found: str) -> None:
        if step.mask is not None and not step.role.innermost:
            raise PackingNotIsolated(
                f"{type(step.module).__name__} {found}, and was handed a packed batch of "
                f"{len(step.mask.boundaries)} documents. Hand it padded batches: they are computed packed inside."
            )


class FirstTokenHeads(HeadOfRows):
    """A head that reads the pooler's vector of a row's first token (next sentence prediction, choices)."""

    name = "first token heads"

    def finds(self, model: Looked) -> str | None:
        head = inspecting.defining(type(model.model), "forward")  # a subclass may define no forward of its own
        pooler = getattr(model.decoder, "pooler", None)
        pooled = model.model is not model.decoder and isinstance(pooler, torch.nn.Module)
        if not pooled or _READS_ALL.search(head.__name__):
            return None
        return f"reads one vector per row, made of its first token by {type(pooler).__name__}"


class RowHeads(HeadOfRows):
    """A head whose ``forward`` computes one result per row."""

    name = "row heads"

    def finds(self, model: Looked) -> str | None:
        return of_whole_rows(model.model) or None


def of_whole_rows(model: Model) -> str:
    """The sign in a model's ``forward`` that it computes one result per row, as a text for an error; empty if none.

    A head that pools a row's last token does not count: :mod:`.pooling` makes it pool each document.
    """
    for cls, forward in inspecting.forwards(type(model)):
        taken = [name for name in _ROW_ARGUMENTS if inspecting.takes(forward, name)]
        if taken:
            return f"takes {taken[0]}, which says one thing of each row"
        if inspecting.has_variable(forward, _CHOICES):
            return f"pools one vector per row, to score choices in {cls.__name__}.forward"
        if inspecting.has_variable(forward, _COMPARES):
            return f"pools one vector per row, to compare texts with images or sounds in {cls.__name__}.forward"
        pools = inspecting.has_variable(forward, pooling.POOLED) or inspecting.reads_name(forward, _CLASSIFIES)
        if pools and not pooling.pools_documents(model):
            return f"pools one vector per row, in another way than by its last token ({cls.__name__}.forward)"
    return ""
