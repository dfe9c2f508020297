"""Evaluation during training, and ``predict``: packed training with padded and with packed evaluation batches."""

from __future__ import annotations

from typing import Any

import torch

import fa2patch

from ..collators import IGNORED, Noted, packed, padded
from ..training import BATCH, Stage, tiny_llama

BOUND = 1e-3
NEAR = 1e-4


def evaluation(stage: Stage, steps: int = 6) -> dict[str, Any]:
    """Compare the held-out losses at every second step between padded and packed training and evaluation."""
    found: dict[str, Any] = {"steps": steps, "held_out": len(stage.held_out)}
    curves = {}
    layouts = {
        "padded, evaluated padded": (False, padded, padded),
        "packed, evaluated padded": (True, packed, padded),
        "packed, evaluated packed": (True, packed, packed),
    }
    for name, (patched, collate, evaluate) in layouts.items():
        curves[name] = _held_out_losses(stage, patched, collate, evaluate, steps)
    reference, *others = curves.values()
    difference = max(abs(a - b) / b for other in others for a, b in zip(other, reference))
    alone = _held_out_losses(stage, False, padded, packed, steps)
    found["losses"] = curves
    found["largest_relative_difference"] = difference
    found["packed_alone"] = max(abs(a - b) / b for a, b in zip(alone, reference))
    found["ok"] = difference < BOUND and len(reference) == steps // 2 == len(others[0]) == len(others[1])
    return found


def _held_out_losses(stage: Stage, patched: bool, collate: Any, evaluate: Any, steps: int) -> list[float]:
    model = tiny_llama()
    if patched:
        fa2patch.apply(model)
    options = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": steps, "held_out": True}
    collator = Noted(collate)
    trainer = stage.trainer(model, collator, kind=_evaluating(stage, evaluate), **options)
    trainer.train()
    return [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]


def _evaluating(stage: Stage, collate: Any) -> Any:
    """The trainer's class, with a separate collator for evaluation."""
    if stage.trl:
        from trl import SFTTrainer as Base
    else:
        from transformers import Trainer as Base

    class Evaluating(Base):  # type: ignore[misc, valid-type]
        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            training, self.data_collator = self.data_collator, collate
            try:
                return super().get_eval_dataloader(eval_dataset)
            finally:
                self.data_collator = training

    return Evaluating


def predict(stage: Stage) -> dict[str, Any]:
    """Compare the logits of every held-out token between padded and packed batches, document by document."""
    model = tiny_llama()
    reference = stage.trainer(model, padded, held_out=True, max_steps=1)
    lengths = [len(example["input_ids"]) for example in reference.eval_dataset]  # TRL may have added end tokens
    by_row = reference.predict(reference.eval_dataset)
    fa2patch.apply(model)
    trainer = stage.trainer(model, packed, held_out=True, max_steps=1)
    by_batch = trainer.predict(trainer.eval_dataset)
    documents = []
    for row, start in enumerate(range(0, len(lengths), BATCH)):
        at = 0
        for length in lengths[start : start + BATCH]:
            documents.append((_first(by_batch.predictions)[row, at : at + length], by_batch.label_ids[row, at]))
            at += length
    logits = torch.tensor(_first(by_row.predictions))
    scale = float(logits.abs().max())
    off = max(
        float((torch.tensor(found) - logits[row, :length]).abs().max()) / scale
        for row, ((found, _), length) in enumerate(zip(documents, lengths))
    )
    starts = all(int(label) == IGNORED for _, label in documents)
    return {
        "ok": off < NEAR and starts and len(documents) == len(lengths),
        "logits_off_by": off,
        "shape_padded": list(logits.shape),
        "shape_packed": list(_first(by_batch.predictions).shape),
        "loss_padded": by_row.metrics["test_loss"],
        "loss_packed": by_batch.metrics["test_loss"],
    }


def _first(predictions: Any) -> Any:
    return predictions[0] if isinstance(predictions, tuple) else predictions
