"""Arguments and outputs with one value per row: a packed batch needs a value per token or per document."""

from __future__ import annotations

import re
from typing import Any

import torch

from ..._types import Call, Model
from ...documents.names import FEWER_LOGITS, LABELS, LENGTHS
from ...errors import PackingNotIsolated
from ..calls import passed
from ..packed_mask import PackedMask
from ..step import Step
from .trait import Trait

_OF_MEDIA = re.compile(
    r"pixel|image|video|audio|vision|grid|feature|patch|aspect|rope_deltas|second_per|logits_to_keep"
)
_OF_THE_BATCH = ("num_items_in_batch", "cache_position")


class RowValues(Trait):
    """Refuse a packed batch if an argument or an output of the model has one value per row."""

    name = "row values"

    def before(self, step: Step, found: Any) -> None:
        if step.mask is not None and not (step.role.pools or step.role.innermost):
            # FirstLabels has looked at the labels of a model that predicts the next token.
            looked_at = LABELS if step.role.predicts_the_next else ()
            others = {name: value for name, value in step.call.items() if name not in looked_at}
            refuse_arguments_of_rows(step.module, others, step.mask)

    def after(self, step: Step, found: Any, output: Any) -> Any:
        role = step.role
        if step.mask is not None and role.outermost and not (step.handed or role.innermost or role.pools):
            refuse_outputs_of_rows(step.module, output, step.call, step.mask, role.predicts_the_next)
        return output


def refuse_arguments_of_rows(model: Model, call: Call, mask: PackedMask) -> None:
    """Refuse arguments that have one value per row.

    Examples are ``start_positions`` of a question-answering head and ``mc_token_ids`` of a multiple-choice head. It is
    not called for heads that pool documents.

    Args:
        model: the model that is called.
        call: its arguments by name.
        mask: the packed mask.

    Raises:
        PackingNotIsolated: an argument has one value per row.
    """
    for name, value in call.items():
        if _OF_MEDIA.search(name) or name in (*_OF_THE_BATCH, *LENGTHS) or not isinstance(value, torch.Tensor):
            continue
        if value.dtype.is_floating_point or value.dim() not in (1, 2) or value.shape[-1] == mask.shape[1]:
            continue
        if value.shape[0] == mask.shape[0]:
            raise PackingNotIsolated(
                f"{type(model).__name__} was handed {name} {list(value.shape)} with a packed batch of "
                f"{_documents(mask)}: a value for each row says nothing of "
                "documents. Expected tensors with a value for each token. Train this model padded."
            )


def refuse_outputs_of_rows(model: Model, output: Any, call: Call, mask: PackedMask, predicts_the_next: bool) -> None:
    """Refuse outputs that have one vector or one number per row.

    Only shapes are compared. Outputs per token, per document or for the whole batch pass. Nothing is checked if there
    are no more documents than rows, or if the call asks for fewer logits (``logits_to_keep``). In a compiled graph that
    does not know the number of documents, there may be more.

    Args:
        model: the model that was called.
        output: its output.
        call: its arguments by name.
        mask: the packed mask.
        predicts_the_next: whether the model predicts next tokens. It may then return ``[batch, length - 1]``, a value
            for each of them (TRL's fused head does).

    Raises:
        PackingNotIsolated: an output has one value per row.
    """
    one_each = not mask.boundaries.uncounted and len(mask.boundaries) <= mask.shape[0]
    if one_each or passed(call, FEWER_LOGITS):
        return
    named = output.items() if hasattr(output, "items") else enumerate(output if isinstance(output, tuple) else [output])
    for name, value in named:
        if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point or "loss" in str(name):
            continue
        of_tokens = [mask.shape, (mask.shape[0], mask.shape[1] - 1)][: 1 + predicts_the_next]
        of_rows = value.dim() in (1, 2) and value.shape[0] == mask.shape[0] and tuple(value.shape) not in of_tokens
        if of_rows and not (value.dim() == 1 and name == 0):  # the first entry of a tuple may be a loss
            raise PackingNotIsolated(
                f"{type(model).__name__} returned {name} {list(value.shape)}, one for each row, for a packed batch of "
                f"{_documents(mask)}: its head pools whole rows. Train this "
                "model padded, or pool the last hidden states document by document."
            )


def _documents(mask: PackedMask) -> str:
    number = "an unknown number of" if mask.boundaries.uncounted else len(mask.boundaries)
    return f"{number} documents in {mask.shape[0]} rows"
