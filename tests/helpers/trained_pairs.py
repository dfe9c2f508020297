"""Fifty steps of Seq2SeqTrainer with pairs of random tokens. In float64, rounding is small."""

from __future__ import annotations

import torch
from pairs import VOCABULARY, right_padded
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

STEPS = 50


def examples():
    drawn = torch.Generator().manual_seed(5)

    def tokens():
        length = int(torch.randint(1, 13, (), generator=drawn))
        return torch.randint(3, VOCABULARY, (length,), generator=drawn).tolist()

    return [{"input_ids": tokens(), "labels": tokens()} for _ in range(4 * STEPS)]


def padded(model):
    def collate(features):
        sources, targets = ([torch.tensor(each[name])[None] for each in features] for name in ("input_ids", "labels"))
        batch = {
            "input_ids": right_padded(sources, model.config.pad_token_id),
            "attention_mask": right_padded([torch.ones_like(source) for source in sources], 0),
            "labels": right_padded(targets, -100),
        }
        batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
        return batch

    return collate


def losses(model, collate, folder, trainer=Seq2SeqTrainer, **options):
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(folder), max_steps=STEPS // options.get("gradient_accumulation_steps", 1), logging_steps=1,
        per_device_train_batch_size=4, learning_rate=1e-3, save_strategy="no", report_to=[], use_cpu=True,
        remove_unused_columns=False, disable_tqdm=True, **options,
    )  # fmt: skip
    made = trainer(model, arguments, train_dataset=examples(), data_collator=collate)
    made.train()
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]
