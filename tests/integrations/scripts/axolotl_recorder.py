"""A plugin of axolotl that writes what a training did to the file that RECORD names."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from axolotl.integrations.base import BasePlugin
from transformers import TrainerCallback

TENSORS = (torch.Tensor, int, bool)


class Recorder(BasePlugin):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[int] = []
        self.batches: list[dict[str, Any]] = []
        self.models = 0

    def post_model_load(self, cfg: Any, model: Any) -> None:
        self.models += 1
        named = dict(model.named_modules())
        layer = next(module for name, module in named.items() if name.endswith("layers.0"))
        layer.register_forward_pre_hook(self.count, with_kwargs=True)

    def count(self, layer: Any, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        self.tokens.append(hidden[..., 0].numel())

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        training_step = trainer.training_step

        def step(model: Any, inputs: Any, *args: Any) -> Any:
            if not self.batches:
                kept = {name: value for name, value in inputs.items() if isinstance(value, TENSORS)}
                self.batches.append({k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in kept.items()})
            return training_step(model, inputs, *args)

        trainer.training_step = step
        return [Writer(self, trainer)]

    def verified(self, model: Any) -> dict[str, Any]:
        import fa2patch

        if fa2patch.status(model) is None or "cu_seq_lens_q" not in self.batches[0]:
            return {}
        found = fa2patch.verify(model, batch=self.batches[0])
        return {"ok": found.ok, "documents": len(self.batches[0]["cu_seq_lens_q"]) - 1}


class Writer(TrainerCallback):  # type: ignore[misc]
    def __init__(self, recorder: Recorder, trainer: Any) -> None:
        self.recorder, self.trainer = recorder, trainer

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        logs = [entry for entry in state.log_history if {"loss", "eval_loss"} & entry.keys()]
        found = {
            "losses": [entry["loss"] for entry in logs if "loss" in entry],
            "norms": [entry["grad_norm"] for entry in logs if "loss" in entry],
            "eval": [entry["eval_loss"] for entry in logs if "eval_loss" in entry],
            "batch": {name: list(getattr(value, "shape", ())) for name, value in self.recorder.batches[0].items()},
            "tokens": self.recorder.tokens[:],
            "models": self.recorder.models,
        }
        if os.environ["VERIFIED"]:
            found["verified"] = self.recorder.verified(self.trainer.model)
        with open(os.environ["RECORD"], "w") as file:
            json.dump(found, file)
