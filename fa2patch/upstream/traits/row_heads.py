"""Heads that make one vector, or one softmax, of a whole row. They are refused."""

from __future__ import annotations

import re
from typing import Any

import torch

from ...errors import UnsupportedModel
from .. import inspecting
from ..looked import Looked
from . import pooling
from .trait import Trait

_ROW_ARGUMENTS = (
    "start_positions", "end_positions", "mc_token_ids", "mc_labels", "next_sentence_label", "sentence_order_label",
)  # fmt: skip
"""Arguments that name one place in a row, or say one thing of it."""

_CHOICES = "num_choices"
"""The variable of upstream's forwards that says how many rows belong to one question, in all versions."""

_CLASSIFIES = "problem_type"
"""What a forward reads off the config to choose the loss of one label for each row. No token classifier does."""

_POOLS = "pooled_logits"
_READS_ALL = re.compile("SequenceClassification|CausalLM|LMHead|MaskedLM|TokenClassification")


class FirstTokenHeads(Trait):
    """A head that reads the vector that its base model makes of a row's first token (next sentence, choices)."""

    name = "first token heads"

    def finds(self, model: Looked) -> Any:
        head = inspecting.defining(type(model.model), "forward")  # of a subclass without its own
        pooled = isinstance(getattr(model.decoder, "pooler", None), torch.nn.Module)
        return True if model.model is not model.decoder and pooled and not _READS_ALL.search(head.__name__) else None

    def refuses(self, model: Looked, found: Any) -> None:
        raise UnsupportedModel(
            f"{model} reads one vector per row, made of its first token by {type(model.decoder.pooler).__name__}, and "
            "a packed row holds many documents. Train it padded, or without that head."
        )


class RowHeads(Trait):
    """A head whose ``forward`` makes one result of a whole row."""

    name = "row heads"

    def finds(self, model: Looked) -> str | None:
        return of_whole_rows(model.model) or None

    def refuses(self, model: Looked, found: str) -> None:
        raise UnsupportedModel(
            f"{model} {found}, and a packed row holds many documents. Nothing was patched. Train it padded."
        )


def of_whole_rows(model: Any) -> str:
    """What in a model's ``forward`` shows that it makes one result of a whole row; empty where nothing does."""
    for cls, forward in inspecting.forwards(type(model)):
        taken = [name for name in _ROW_ARGUMENTS if inspecting.takes(forward, name)]
        if taken:
            return f"takes {taken[0]}, which says one thing of each row"
        if inspecting.has_variable(forward, _CHOICES):
            return f"pools one vector per row, to score choices in {cls.__name__}.forward"
        pools = inspecting.has_variable(forward, _POOLS) or inspecting.reads_name(forward, _CLASSIFIES)
        if pools and not pooling.pools_documents(model):
            return f"pools one vector per row, in another way than by its last token ({cls.__name__}.forward)"
    return ""
