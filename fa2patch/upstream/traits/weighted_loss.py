"""A loss in which every document has the same weight, from the batches of ``loss_weights="document"``.

A trainer knows only ``labels``, and Trainer divides the loss by how many of them there are in a step, over accumulated
batches and processes. So ``labels`` hold one label for each document, which makes this the number of documents. The
tokens to predict are in ``loss_labels``, and their weights, which add up to 1 in each document, in ``loss_weights``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..._types import Call
from ...documents.checks import described
from ...documents.device import require
from ...documents.names import (
    COUNTED_LABEL,
    FEWER_LOGITS,
    IGNORE_INDEX,
    IGNORED_LABEL,
    LABELS,
    LOSS_LABELS,
    LOSS_WEIGHTS,
)
from ...errors import BadBatch
from .. import inspecting
from ..calls import passed
from ..step import Step
from .trait import Trait

_ITEMS = "num_items_in_batch"
_MEANT = 'loss_labels, which DataCollator...(loss_weights="document") makes'


@dataclass(eq=False)
class Weighted:
    """What a weighted loss is computed from.

    Attributes:
        labels: int64 ``[batch, length]``, -100 outside the loss.
        weights: float32 ``[batch, length]``, 0 outside the loss.
        items: the number of documents in the step, from Trainer; None for those in this batch.
    """

    labels: torch.Tensor
    weights: torch.Tensor
    items: Any

    def loss(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the sum of the weighted losses of the tokens, divided by the number of documents."""
        logits = (logits if logits.dtype == torch.float64 else logits.float())[:, :-1]
        labels, weights = self.labels[:, 1:].to(logits.device), self.weights[:, 1:].to(logits)
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        items = weights.sum() if self.items is None else self.items  # without labels: NaN, as in padded training
        return (losses * weights.flatten()).sum() / torch.as_tensor(items, device=logits.device)


class WeightedLoss(Trait):
    """Compute the loss of a batch with ``loss_labels`` from the model's logits."""

    name = "weighted loss"

    def before(self, step: Step, found: Any) -> None:
        call = step.call
        if call.get(LOSS_LABELS) is None:
            return
        _require_logits(step)
        if step.by_hook:  # a foreign forward: what it calls in the end is ours, or refuses
            return
        _require_labels(step)
        step.kept[self.name] = Weighted(call[LOSS_LABELS], call[LOSS_WEIGHTS], call.get(_ITEMS))
        taken = (*LABELS, LOSS_LABELS, LOSS_WEIGHTS, _ITEMS)
        step.call = {name: value for name, value in call.items() if name not in taken}

    def after(self, step: Step, found: Any, output: Any) -> Any:
        weighted = step.kept.get(self.name)
        if weighted is None:
            return output
        logits = output[0] if isinstance(output, tuple) else output.get("logits")
        if not isinstance(logits, torch.Tensor) or logits.shape[:-1] != weighted.labels.shape:
            raise BadBatch(
                f"{_MEANT}, need logits {[*weighted.labels.shape, 'vocabulary']}, but {type(step.module).__name__} "
                f"returned {described(logits)}. {_INSTEAD}"
            )
        loss = weighted.loss(logits)
        return (loss, *output) if isinstance(output, tuple) else type(output)(**{**output, "loss": loss})


_INSTEAD = (
    "Losses that another package computes without logits (cut-cross-entropy, TRL's fused head, Liger's applied after "
    'fa2patch) count tokens: leave loss_weights="document" out, or leave that loss out and call fa2patch.apply(model) '
    "last."
)


def _require_logits(step: Step) -> None:
    """Refuse a model that is not a causal LM, or that another package's forward called past the causal LM."""
    role, model = step.role, type(step.module).__name__
    learns = role.predicts_the_next and not role.innermost
    if not learns or (step.by_hook and not step.calls.takes(LOSS_LABELS)):
        raise BadBatch(f"{_MEANT}, came to {model}, which does not compute a causal LM's loss from them. {_INSTEAD}")
    if step.call.get("fused_lm_head"):
        raise BadBatch(f"{_MEANT}, came to {model} with fused_lm_head=True. {_INSTEAD}")


def _require_labels(step: Step) -> None:
    """Refuse arguments with which the loss would be another one than the documents' mean."""
    call, labels, weights = step.call, step.call[LOSS_LABELS], step.call.get(LOSS_WEIGHTS)
    if call.get("labels") is None:
        raise BadBatch(
            f"{_MEANT}, came without labels. label_smoothing_factor and compute_loss_func take them out, and "
            "compute another loss. Leave these two out."
        )
    if not isinstance(weights, torch.Tensor) or weights.shape != labels.shape or call["labels"].shape != labels.shape:
        raise BadBatch(
            f"loss_weights: expected one for each of loss_labels {list(labels.shape)}, {described(weights)}."
        )
    require(
        ((call["labels"] == IGNORED_LABEL) | (call["labels"] == COUNTED_LABEL)).all(),
        BadBatch,
        f"{_MEANT}, came with labels of tokens: expected labels that count documents, because the weighted losses are "
        "divided by the number of documents. Weights of tokens of your own are not supported: leave them out.",
    )
    fewer = passed(call, FEWER_LOGITS)
    if any(kept is not None and not (isinstance(kept, int) and kept == 0) for kept in fewer.values()):
        raise BadBatch(f"{_MEANT}, need all logits, but {', '.join(fewer)} was passed. Leave it out.")
    if call.get("shift_labels") is not None or (step.mask is not None and step.mask.part is not None):
        raise BadBatch(f"{_MEANT}, need whole rows, but this process has a part of each. Leave loss_weights out.")
    if call.get(IGNORE_INDEX) not in (None, IGNORED_LABEL):
        raise BadBatch(
            f"{_MEANT}, came with ignore_index={call[IGNORE_INDEX]}: the collator made weights where labels are not "
            f"{IGNORED_LABEL}. Leave ignore_index out, and give the collator labels of {IGNORED_LABEL} instead."
        )
    if _adds_router_loss(step, call):
        raise BadBatch(
            f"{_MEANT}, came to {type(step.module).__name__} with output_router_logits=True, which adds the router's "
            "own loss. Set model.config.output_router_logits = False."
        )


def _adds_router_loss(step: Step, call: Call) -> bool:
    asked = call.get("output_router_logits")
    config = inspecting.text_config(step.module.config)
    return bool(getattr(config, "output_router_logits", False) if asked is None else asked)
