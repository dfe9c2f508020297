"""Trains with DPOTrainer as it is, packed, and packed without sharing prompts, each batch in one way after another.

The part *preferences* starts ``python -m compat_matrix.bench.preferences LAYERS HIDDEN STEPS`` in the environment of a
stack, and reads the JSON that it prints.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

import datasets
import numpy as np
import tokenizers
import torch
import transformers
import trl

import fa2patch

from . import operators

WAYS: dict[str, Any] = {
    "padded": lambda trainer: trainer,
    "packed": fa2patch.packed_trainer,
    "prompts apart": lambda trainer: fa2patch.packed_trainer(trainer, share_prompts=False),
}


def main(layers: int, hidden: int, steps: int) -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    trainers = {name: made(way(trl.DPOTrainer), layers, hidden) for name, way in WAYS.items()}
    batches = {name: iter(trainer.get_train_dataloader()) for name, trainer in trainers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    started: dict[str, dict[str, int]] = {}
    for number in range(1, steps + 1):
        for name, trainer in trainers.items():
            batch, before = next(batches[name]), time.perf_counter()
            if number < steps:
                trainer.training_step(trainer.model, batch)
                seconds[name].append(time.perf_counter() - before)
            else:  # counting takes time, so that this step's is not taken
                with operators.counted() as counts:
                    trainer.training_step(trainer.model, batch)
                started[name] = dict(counts)
            trainer.model.zero_grad()
    print(json.dumps({"seconds": seconds, "operators": {name: sum(each.values()) for name, each in started.items()}}))


def made(kind: Any, layers: int, hidden: int) -> Any:
    # Prompts of 5 to 40 words and answers of 5 to 120, a word a token, eight pairs in a batch.
    words = [f"w{number}" for number in range(1000)]
    table = {word: number for number, word in enumerate(["<pad>", "<eos>", *words])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(table, unk_token="<eos>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
    drawn = np.random.default_rng(0)

    def text(longest: int) -> str:
        return " ".join(drawn.choice(words, drawn.integers(5, longest)))

    rows = [{"prompt": text(40) + " ", "chosen": text(120), "rejected": text(120)} for _ in range(200)]
    config = transformers.Qwen2Config(
        vocab_size=len(table), hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=max(4, hidden // 64), num_key_value_heads=max(2, hidden // 128), pad_token_id=0,
        bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    args = trl.DPOConfig(
        tempfile.mkdtemp(), per_device_train_batch_size=8, bf16=False, report_to=[], gradient_checkpointing=False,
        dataloader_pin_memory=False, disable_tqdm=True,
    )  # fmt: skip
    policy, reference = (transformers.Qwen2ForCausalLM(config) for _ in range(2))
    reference.load_state_dict(policy.state_dict())
    data = datasets.Dataset.from_list(rows)
    trainer = kind(policy, reference, args=args, train_dataset=data, processing_class=tokenizer)
    trainer.current_gradient_accumulation_steps = 1  # train() would say so
    return trainer


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
