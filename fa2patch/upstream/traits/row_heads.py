"""Heads that compute one vector or one softmax over a whole row. They are refused."""

from __future__ import annotations

import re

import torch

from ..._types import Model
from ...errors import UnsupportedModel
from .. import inspecting
from ..looked import Looked
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


class FirstTokenHeads(Trait):
    """Refuse a head that reads the pooler's vector of a row's first token (next sentence prediction, choices)."""

    name = "first token heads"

    def finds(self, model: Looked) -> str | None:
        head = inspecting.defining(type(model.model), "forward")  # a subclass may define no forward of its own
        pooler = getattr(model.decoder, "pooler", None)
        pooled = model.model is not model.decoder and isinstance(pooler, torch.nn.Module)
        return type(pooler).__name__ if pooled and not _READS_ALL.search(head.__name__) else None

    def refuses(self, model: Looked, found: str) -> None:
        raise UnsupportedModel(
            f"{model} reads one vector per row, made of its first token by {found}, and "
            "a packed row holds many documents. Train it padded, or without that head."
        )


class RowHeads(Trait):
    """Refuse a head whose ``forward`` computes one result per row."""

    name = "row heads"

    def finds(self, model: Looked) -> str | None:
        return of_whole_rows(model.model) or None

    def refuses(self, model: Looked, found: str) -> None:
        raise UnsupportedModel(
            f"{model} {found}, and a packed row holds many documents. Nothing was patched. Train it padded."
        )


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
