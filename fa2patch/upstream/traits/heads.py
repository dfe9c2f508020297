"""What a model's head means by labels, and what a head cannot mean for a packed row.

Decided once, in ``apply``, from the modules and the code that will run, never from the name of a class.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch

from ...errors import PackingNotIsolated
from ..packed_mask import PackedMask

_LOSSES = "transformers.loss.loss_utils"
_SHIFTED = "ForCausalLMLoss"

_OF_MEDIA = re.compile(
    r"pixel|image|video|audio|vision|grid|feature|patch|aspect|rope_deltas|second_per|logits_to_keep"
)
_OF_THE_BATCH = ("num_items_in_batch", "cache_position")


def predicts_the_next(model: Any, sees_both_ways: bool) -> bool:
    """Whether a token's label is what the token before it predicts (not so in a token classifier, or a masked LM).

    The function that the model's forward calls for its loss says so, where that is one of Transformers'. Else it is so
    where the head has an output for each token of the vocabulary and attention is causal.
    """
    loss = _loss_function(model)
    of_transformers = getattr(loss, "__module__", None) == _LOSSES
    if of_transformers:
        return bool(loss is getattr(sys.modules[_LOSSES], _SHIFTED))
    return not sees_both_ways and _has_vocabulary_head(model)


def _loss_function(model: Any) -> Any:
    """What ``self.loss_function`` is in the model's forward (4.46 on), or None where the forward asks for none."""
    asks = any("loss_function" in code.co_names for code in forward_codes(type(model)))
    known = getattr(model, "loss_type", None) is not None or hasattr(model, "_loss_function")
    return model.loss_function if asks and known and hasattr(type(model), "loss_function") else None


def forward_codes(cls: type) -> Iterator[Any]:
    """The code of a class's ``forward``, then that of the inherited ones which it goes on in."""
    for base in cls.__mro__:
        forward = vars(base).get("forward")
        code = getattr(inspect.unwrap(forward), "__code__", None) if callable(forward) else None
        if code is not None:
            yield code
            if "forward" not in code.co_names:
                return


def _has_vocabulary_head(model: Any) -> bool:
    try:
        head = model.get_output_embeddings()
        rows = model.get_input_embeddings().weight.shape[0]
    except (AttributeError, NotImplementedError):
        head, rows = None, -1
    own = (getattr(child, "weight", None) for child in model.children())
    return head is not None or any(isinstance(weight, torch.Tensor) and weight.shape[0] == rows for weight in own)


def refuse_arguments_of_rows(model: Any, call: dict[str, Any], mask: PackedMask) -> None:
    """Raise :class:`PackingNotIsolated` for a tensor that holds one thing for each row, of which a row has many.

    Such are the spans that a question-answering head is trained on (``start_positions``), the sentences that a choice
    is made of (``mc_token_ids``). Labels of heads that pool documents never come here.
    """
    for name, value in call.items():
        if _OF_MEDIA.search(name) or name in _OF_THE_BATCH or not isinstance(value, torch.Tensor):
            continue
        if value.dtype.is_floating_point or value.dim() not in (1, 2) or value.shape[-1] == mask.shape[1]:
            continue
        if value.shape[0] == mask.shape[0] and "cu_seq" not in name and "max_length" not in name:
            raise PackingNotIsolated(
                f"{type(model).__name__} was handed {name} {list(value.shape)} with a packed batch of "
                f"{len(mask.boundaries)} documents in {mask.shape[0]} rows: a value for each row says nothing of "
                "documents. Expected tensors with a value for each token. Train this model padded."
            )


def refuse_outputs_of_rows(model: Any, output: Any, call: dict[str, Any], mask: PackedMask) -> None:
    """Raise :class:`PackingNotIsolated` where a model returns one vector for each row of a packed batch.

    Only shapes are looked at. What has a value for each token, for each document or for the whole batch is right.
    """
    if len(mask.boundaries) <= mask.shape[0] or any(call.get(name) is not None for name in _FEWER_LOGITS):
        return
    named = output.items() if hasattr(output, "items") else enumerate(output if isinstance(output, tuple) else [output])
    for name, value in named:
        if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point or "loss" in str(name):
            continue
        of_rows = value.dim() in (1, 2) and value.shape[0] == mask.shape[0] and tuple(value.shape) != mask.shape
        if of_rows and not (value.dim() == 1 and name == 0):  # a tuple's first may be a loss
            raise PackingNotIsolated(
                f"{type(model).__name__} returned {name} {list(value.shape)}, one for each row, for a packed batch of "
                f"{len(mask.boundaries)} documents in {mask.shape[0]} rows: its head pools whole rows. Train this "
                "model padded, or pool the last hidden states document by document."
            )


_FEWER_LOGITS = ("logits_to_keep", "num_logits_to_keep")
