"""A small Llama that every room's tests may take apart: two layers of 32 numbers, and 128 tokens."""

from typing import Any

from compat_matrix import tiny_models


def tiny_llama() -> Any:
    # The weights are so large that every token affects every later one.
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0}
    return tiny_models.build("llama", "sdpa", **sizes, **heads)
