"""Configurations of published models. Nothing is downloaded; weights are random."""

from __future__ import annotations

from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "Llama-2-7B": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
    },
    "Mistral-7B": {
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "sliding_window": 4096,
    },
    "Granite-8B-code": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
}

TOY = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 97}
"""The sizes of a toy model, which shows within seconds on a CPU that everything runs."""


def config(shape: str, layers: int | None = None, toy: bool = False) -> Any:
    """Return the Transformers config of a shape, optionally with fewer layers or as a toy."""
    from transformers import AutoConfig

    numbers = {**SHAPES[shape], "max_position_embeddings": 4096, "use_cache": False}
    if toy:
        groups = numbers["num_attention_heads"] // numbers["num_key_value_heads"]
        numbers.update(TOY, num_hidden_layers=2, num_key_value_heads=max(1, TOY["num_attention_heads"] // groups))
    if layers:
        numbers["num_hidden_layers"] = layers
    return AutoConfig.for_model(**numbers)
