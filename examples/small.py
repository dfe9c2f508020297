"""Shared by the small examples: a tiny Llama and docstrings for a quick start, or `--model NAME --data FILE.jsonl`."""

from __future__ import annotations

import argparse
import ast
import inspect
from pathlib import Path
from typing import Any

import train_packed
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    set_seed,
)

Texts = list[train_packed.Text]  # (prompt, completion)


def options(doc: str | None, argv: list[str] | None) -> argparse.Namespace:
    """Parse the options that all small examples have. The first line of ``doc`` is the description."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--model", help="a causal LM, with its tokenizer, in place of the tiny Llama")
    parser.add_argument("--data", type=Path, metavar="FILE.jsonl", help="per line prompt and completion, or text")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (%(default)s)")
    parser.add_argument("--output", default="runs/example", help="where checkpoints go (%(default)s)")
    return parser.parse_args(argv)


def docstrings() -> Texts:
    """Return signatures and docstrings of a few modules."""
    texts = []
    for module in (argparse, ast, inspect):
        tree = ast.parse(inspect.getsource(module))
        texts += train_packed.documented(tree.body, [f"# {module.__name__}"])
    return texts


def texts(arguments: argparse.Namespace) -> Texts:
    """Return the texts of `--data`, or docstrings."""
    return train_packed.read_jsonl(arguments.data) if arguments.data else docstrings()


def load(arguments: argparse.Namespace, texts: Texts) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model and tokenizer of `--model`, or a tiny Llama with a tokenizer trained on the texts."""
    set_seed(0)
    if arguments.model:
        model = AutoModelForCausalLM.from_pretrained(arguments.model)
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    else:
        tokenizer = tiny_tokenizer(texts)
        model = tiny_llama(tokenizer)
    set_seed(0)  # again, so that the documents' order does not depend on how the weights were drawn
    return model, tokenizer


def tiny_tokenizer(texts: Texts) -> PreTrainedTokenizerBase:
    """Train a small tokenizer on the texts."""
    end = train_packed.END
    own = train_packed.train_tokenizer(texts)
    return PreTrainedTokenizerFast(tokenizer_object=own, eos_token=end, pad_token=end, model_max_length=512)


def tiny_llama(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Build a Llama of two layers with random weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=512,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def tokenized(texts: Texts, tokenizer: PreTrainedTokenizerBase, max_length: int = 512) -> list[dict[str, Any]]:
    """Return `input_ids` and `labels` for each text; the prompt's labels are -100."""
    examples = []
    for prompt, completion in texts:
        given = tokenizer(prompt)["input_ids"] if prompt else []
        learnt = tokenizer(completion, add_special_tokens=not prompt)["input_ids"] + [tokenizer.eos_token_id]
        ids, labels = given + learnt, [-100] * len(given) + learnt
        examples.append({"input_ids": ids[:max_length], "labels": labels[:max_length]})
    return examples
