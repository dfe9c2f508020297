"""Notes what every Trainer of a process does: its logs, its batches, and what the first layer computes."""

from __future__ import annotations

import atexit
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers


class Recorder:
    """What a training did: its logs, its batches, and the tokens that the first layer computed in each forward."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []
        self.tokens: list[int] = []
        self.batches: list[dict[str, Any]] = []
        self.model: Any = None

    def watch(self) -> None:
        trainer, recorder = transformers.Trainer, self
        log, step = trainer.log, trainer.training_step

        def logging(self: Any, logs: dict[str, Any], *args: Any) -> None:
            recorder.logs.append({key: value for key, value in logs.items() if isinstance(value, (int, float))})
            log(self, logs, *args)

        def stepping(self: Any, model: Any, inputs: Any, *args: Any) -> Any:
            if recorder.model is None:
                recorder.model = self.model
                named = dict(self.model.named_modules())
                layer = next(module for name, module in named.items() if name.endswith("layers.0"))
                layer.register_forward_pre_hook(recorder.count, with_kwargs=True)
            given = inputs.items() if isinstance(inputs, Mapping) else ()  # GRPO's trainers are given examples
            kept = {name: value.clone() for name, value in given if isinstance(value, torch.Tensor)}
            recorder.batches.append(kept)
            return step(self, model, inputs, *args)

        trainer.log, trainer.training_step = logging, stepping

    def write_at_exit(self, file: str) -> None:
        self.watch()
        atexit.register(lambda: Path(file).write_text(json.dumps(self.found())))

    def count(self, layer: Any, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        self.tokens.append(hidden[..., 0].numel())

    @property
    def packed(self) -> bool:
        # One row of documents counts only if no mask for every query keeps them apart.
        batch = self.batches[0]
        masked = "attention_mask" in batch and batch["attention_mask"].dim() == 4
        return len(batch.get("input_ids", ())) == 1 and "position_ids" in batch and not masked

    def found(self) -> dict[str, Any]:
        shapes = {name: list(value.shape) for name, value in self.batches[0].items()}
        found: dict[str, Any] = {"logs": self.logs, "tokens": self.tokens[:], "batch": shapes}
        if self.packed:
            found["verified"] = self.verified()
        return found

    def verified(self) -> dict[str, Any]:
        # ``fa2patch.verify`` runs on the first batch if each of its tokens has a label.
        import fa2patch

        kept = {name: self.batches[0][name] for name in ("input_ids", "labels", "position_ids")}
        if fa2patch.status(self.model) is None or kept["labels"].shape != kept["input_ids"].shape:
            return {}
        found = fa2patch.verify(self.model, batch=kept)
        return {"ok": found.ok, "documents": int((kept["position_ids"] == 0).sum())}
