"""Heads that make one vector, or one softmax, of a whole row; found by what their ``forward`` takes and does."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, Callable

from . import pooling

_ROW_ARGUMENTS = (
    "start_positions", "end_positions", "mc_token_ids", "mc_labels", "next_sentence_label", "sentence_order_label",
)  # fmt: skip
"""Arguments that name one place in a row, or say one thing of it."""

_CHOICES = "num_choices"
"""What upstream's forwards call how many rows of tokens belong to one question, through all versions."""

_CLASSIFIES = "problem_type"
"""What a forward reads off the config only to choose the loss of one label for each row (no token classifier does)."""

_POOLS = "pooled_logits"


def of_whole_rows(model: Any) -> str:
    """What in a model's ``forward`` says that it makes one result of a whole row; nothing where nothing does."""
    for cls, forward in forwards(model):
        parameters = inspect.signature(forward).parameters
        taken = [name for name in _ROW_ARGUMENTS if name in parameters]
        if taken:
            return f"takes {taken[0]}, which says one thing of each row"
        code = getattr(inspect.unwrap(forward), "__code__", None)
        if code is None:
            continue
        if _CHOICES in code.co_varnames:
            return f"pools one vector per row, to score choices in {cls.__name__}.forward"
        if (_POOLS in code.co_varnames or _CLASSIFIES in code.co_names) and not pooling.pools_documents(model):
            return f"pools one vector per row, in another way than by its last token ({cls.__name__}.forward)"
    return ""


def forwards(model: Any) -> Iterator[tuple[type, Callable[..., Any]]]:
    """The ``forward`` of a model's class, and of every class that it inherits from: one may hand on to the next."""
    for cls in type(model).__mro__:
        forward = vars(cls).get("forward")
        if forward is not None and not cls.__module__.startswith("torch."):
            yield cls, forward
