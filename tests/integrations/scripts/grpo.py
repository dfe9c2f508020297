"""An ordinary GRPO script, without fa2patch: ``grpo.py``. Its model and tokenizer are made in a temporary folder.

Prints a JSON object: the logged numbers of each step, and the number of tokens that the first layer computed in each
forward with gradients.
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

import datasets
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from trl import GRPOConfig, GRPOTrainer

WORDS = [
    "the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "while", "seven", "green", "birds", "sing",
    "about",
]  # fmt: skip


def made(folder: str) -> None:
    names = ["<pad>", "<eos>", "<unk>", *WORDS]
    tokenizer = Tokenizer(WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(names), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=256, initializer_range=0.2, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def reward(completions: list[str], **others: Any) -> list[float]:
    # The share of words with an even number of letters.
    words = [text.split() for text in completions]
    return [sum(len(word) % 2 == 0 for word in each) / (len(each) + 1) for each in words]


def main(folder: str) -> None:
    made(folder)
    prompts = [" ".join(WORDS * 2 + WORDS[: number % 13 + 1]) for number in range(32)]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    args = GRPOConfig(
        output_dir=folder, per_device_train_batch_size=8, num_generations=4, beta=0.04, max_completion_length=16,
        max_steps=4, learning_rate=1e-3, adam_epsilon=1e-5, logging_steps=1, save_strategy="no", report_to=[],
        use_cpu=True, bf16=False, disable_tqdm=True, seed=1,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model, reward, args=args,
        train_dataset=datasets.Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder, padding_side="left"),
    )  # fmt: skip
    tokens: list[int] = []

    first = trainer.model.model.layers[0]

    def count(layer: Any, given: Any, named: Any) -> None:
        if layer is first and torch.is_grad_enabled():  # a proof runs a replica
            tokens.append((given[0] if given else named["hidden_states"])[..., 0].numel())

    first.register_forward_pre_hook(count, with_kwargs=True)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    print(json.dumps({"logs": logs, "tokens": tokens, "fa2patch": "fa2patch" in sys.modules}))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(temporary)
