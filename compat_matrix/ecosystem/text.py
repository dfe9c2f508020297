"""Documents of very different lengths from the standard library's docstrings, and a tokenizer trained on them."""

from __future__ import annotations

import ast
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

END, PAD = "<|end|>", "<|pad|>"
LONGEST = 400
"""Characters of a document at most, which are about a third as many tokens."""


def documents(count: int) -> list[str]:
    """Return unique docstrings of the standard library's top modules, ordered by hash to mix modules and lengths."""
    found: dict[str, None] = {}
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        found.update(dict.fromkeys(_docstrings(file)))
    texts = sorted(found, key=lambda text: hash_of(text))
    if len(texts) < count:
        raise RuntimeError(f"looked for {count} docstrings in the standard library, found {len(texts)}")
    return texts[:count]


def hash_of(text: str) -> int:
    """Return a hash that is the same on every machine and in every process, unlike ``hash``."""
    return zlib.crc32(text.encode())


def _docstrings(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            text = (ast.get_docstring(node) or "")[:LONGEST].strip()
            if len(text) > 8:
                yield text


def tokenizer(texts: list[str], vocabulary: int = 512) -> Any:
    """Train a byte-level BPE and return it as a ``PreTrainedTokenizerFast``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=END, pad_token=PAD, model_input_names=["input_ids", "attention_mask"]
    )
