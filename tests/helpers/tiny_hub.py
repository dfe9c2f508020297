"""Tiny models and data in folders of the names under which README and the documentation load them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
import transformers

from compat_matrix import tiny_models

# Architectures by a part of a model's name. All other names get a Llama. The weights are random.
KINDS = {"ModernBERT": "modernbert:masked", "LFM2": "lfm2", "Qwen2-VL": "qwen2_vl"}

TEXTS = [f"Question: what is {n} and {n}?\nAnswer: {' '.join(['it is', str(2 * n)] * (n % 5 + 1))}." for n in range(64)]


def make_data(home: Path) -> None:
    lines = [{"prompt": text.partition("Answer:")[0], "completion": text.partition("Answer:")[2]} for text in TEXTS]
    write(home / "train.jsonl", lines)
    asked = [{"instruction": line["prompt"], "output": line["completion"]} for line in lines]
    write(home / "lucasmccabe-lmi/CodeAlpaca-20k/train.jsonl", asked)
    tokenizer = tiny_tokenizer()
    write(home / "path/to/my/dataset", [{"input_ids": tokenizer(text)["input_ids"]} for text in TEXTS])


def make_models(code: str, home: Path) -> None:
    # The models that a page's code loads are made in folders of their names.
    for name in re.findall(r"(?:from_pretrained\(\s*|\bname = )\"([\w./-]+)\"", code):
        if not (home / name).exists():
            tokenizer = tiny_tokenizer()
            tiny_model(name, len(tokenizer)).save_pretrained(home / name)
            tokenizer.save_pretrained(home / name)


def write(file: Path, lines: list[dict[str, object]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def save_tiny_llama(folder: Path) -> None:
    # The random weights are large. A program is given the folder.
    tokenizer = tiny_tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=512, initializer_range=0.3,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tiny_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>", "<pad>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator(TEXTS, trainer)
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    returned = ["input_ids", "attention_mask"]  # as Qwen's and Llama's; 4.x would add token_type_ids
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, model_input_names=returned, **special)


def tiny_model(name: str, words: int):
    kind = next((kind for part, kind in KINDS.items() if part in name), None)
    if kind is not None:
        return tiny_models.build(kind, "sdpa", vocab_size=words)
    config = transformers.LlamaConfig(
        vocab_size=words, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)
