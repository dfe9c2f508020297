"""Train an encoder-decoder on the same mini-batches padded and packed: same steps, same losses, fewer tokens.

    python seq2seq.py [--model t5|bart] [--steps 20]

The pairs have lengths like those of a translation corpus. It runs offline, on a CPU, in less than a minute.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)

import fa2patch

BATCH, VOCABULARY, WIDTH = 16, 500, 128
MODELS = ("t5", "bart")


def pairs(count: int) -> list[dict[str, list[int]]]:
    """Return random pairs; a few are long, as in a corpus of sentences."""
    drawn = torch.Generator().manual_seed(0)
    lengths = torch.empty(count).log_normal_(3.0, 0.7, generator=drawn).clamp(2, 120).long()
    found = []
    for length in lengths.tolist():
        other = max(2, round(length * (0.7 + 0.6 * float(torch.rand((), generator=drawn)))))
        source, target = (torch.randint(3, VOCABULARY, (size,), generator=drawn).tolist() for size in (length, other))
        found.append({"input_ids": source, "labels": target})
    return found


def load(name: str) -> Any:
    """Return a small model with random weights, and without dropout, so that both ways have the same losses."""
    torch.manual_seed(0)
    if name == "t5":
        return T5ForConditionalGeneration(
            T5Config(vocab_size=VOCABULARY, d_model=WIDTH, d_kv=32, d_ff=2 * WIDTH, num_layers=3, num_heads=4,
                     dropout_rate=0.0, decoder_start_token_id=0)
        )  # fmt: skip
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    return BartForConditionalGeneration(
        BartConfig(vocab_size=VOCABULARY, d_model=WIDTH, encoder_layers=3, decoder_layers=3, encoder_ffn_dim=2 * WIDTH,
                   decoder_ffn_dim=2 * WIDTH, max_position_embeddings=256, dropout=0.0, **heads)
    )  # fmt: skip


def padded(model: Any) -> Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]:
    """Return what Transformers' DataCollatorForSeq2Seq does with a tokenizer."""

    def rows(features: list[dict[str, Any]], name: str, value: int) -> torch.Tensor:
        each = [torch.tensor(feature[name]) for feature in features]
        return torch.nn.utils.rnn.pad_sequence(each, batch_first=True, padding_value=value)

    def collate(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ids = rows(features, "input_ids", model.config.pad_token_id)
        mask = rows([{"ones": [1] * len(feature["input_ids"])} for feature in features], "ones", 0)
        return {"input_ids": ids, "attention_mask": mask, "labels": rows(features, "labels", -100)}

    return collate


def train(name: str, steps: int, packed: bool) -> dict[str, Any]:
    """Train one way, and return its losses, the tokens that both stacks computed, and the time."""
    model = load(name)
    collate: Callable[[list[dict[str, Any]]], dict[str, Any]] = padded(model)
    if packed:
        fa2patch.apply(model, prove=False)
        fa2patch.verify(model)  # in place of a proof with the first batches, which takes longer than this training
        collate = fa2patch.DataCollatorForSeq2Seq()
    tokens = 0

    def counted(features: list[dict[str, Any]]) -> dict[str, Any]:
        nonlocal tokens
        batch = collate(features)
        tokens += batch["input_ids"].numel() + batch["labels"].numel()
        return batch

    with tempfile.TemporaryDirectory() as folder:
        arguments = Seq2SeqTrainingArguments(
            output_dir=folder, per_device_train_batch_size=BATCH, max_steps=steps, learning_rate=1e-3, logging_steps=1,
            save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, remove_unused_columns=False,
        )  # fmt: skip
        trainer = Seq2SeqTrainer(model, arguments, train_dataset=pairs(BATCH * steps), data_collator=counted)
        start = time.process_time()
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": losses, "tokens": tokens, "seconds": time.process_time() - start}


def main(argv: list[str] | None = None) -> dict[str, dict[str, Any]]:
    """Train both ways, print a table, and return what each took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="t5")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(sys.argv[1:] if argv is None else argv)
    found = {way: train(options.model, options.steps, way == "packed") for way in ("padded", "packed")}
    table = Table("", "tokens of both stacks", "seconds of CPU", "first loss", "last loss")
    for way, one in found.items():
        first, last = (f"{one['losses'][at]:.4f}" for at in (0, -1))
        table.add_row(way, f"{one['tokens']:,}", f"{one['seconds']:.1f}", first, last)
    Console(width=100).print(table)
    return found


if __name__ == "__main__":
    main()
