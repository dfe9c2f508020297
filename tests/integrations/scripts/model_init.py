"""A Trainer with ``model_init``, which calls the model's class; without fa2patch: ``model_init.py padded|packed ...``.

The packed rows have ``position_ids`` that restart and a mask of ones. For each layout, two trainings by one Trainer and
an evaluation. Prints a JSON object: the losses of each layout.
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

import torch
import transformers


def make_model() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=256, initializer_range=0.3,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def documents(number: int) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 40, (number,), generator=generator).tolist()
    rows = [torch.randint(3, 64, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": row, "labels": [-100, *row[1:]]} for row in rows]


def padded(features: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(feature["input_ids"]) for feature in features)

    def filled(name: str, value: int) -> torch.Tensor:
        return torch.tensor([feature[name] + [value] * (longest - len(feature[name])) for feature in features])

    ids = filled("input_ids", 0)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": filled("labels", -100)}


def packed(features: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    row: dict[str, list[int]] = {
        name: [value for feature in features for value in feature[name]] for name in ("input_ids", "labels")
    }
    row["position_ids"] = [position for feature in features for position in range(len(feature["input_ids"]))]
    row["attention_mask"] = [1] * len(row["input_ids"])
    return {name: torch.tensor([values]) for name, values in row.items()}


def arguments(folder: str, **more: Any) -> Any:
    return transformers.TrainingArguments(
        output_dir=folder, per_device_train_batch_size=4, per_device_eval_batch_size=4, max_steps=4,
        learning_rate=1e-3, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        remove_unused_columns=False, seed=3, **more,
    )  # fmt: skip


def trained(layout: str, folder: str) -> dict[str, Any]:
    rows = documents(16)
    trainer = transformers.Trainer(
        model_init=make_model, args=arguments(folder), train_dataset=rows, eval_dataset=rows[:6],
        data_collator={"padded": padded, "packed": packed}[layout],
    )  # fmt: skip
    losses = []
    for _ in range(2):
        trainer.train()
        losses += [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": losses, "eval_loss": trainer.evaluate()["eval_loss"]}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        found = {layout: trained(layout, temporary) for layout in sys.argv[1:]}
    print(json.dumps({**found, "fa2patch": "fa2patch" in sys.modules}))
