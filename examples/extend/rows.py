"""What the examples of this folder share: a tiny model, some documents, and the comparison of a row with each alone."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig

CONFIG = LlamaConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
LENGTHS = (5, 1, 9, 3)


def model_of(cls: Any, config: Any = CONFIG) -> Any:
    """A random model in eval mode. Its weights are scaled up, so that a leak is not lost in rounding."""
    torch.manual_seed(0)
    model = cls(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1)
    return model


def documents() -> list[torch.Tensor]:
    """Documents of random tokens, int64 ``[length]`` each."""
    drawn = torch.Generator().manual_seed(0)
    return [torch.randint(0, CONFIG.vocab_size, (length,), generator=drawn) for length in LENGTHS]


def packed(docs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """One row of all documents, with ``position_ids`` that restart for each: int64 ``[1, tokens]``."""
    return {
        "input_ids": torch.cat(docs)[None],
        "position_ids": torch.cat([torch.arange(len(doc)) for doc in docs])[None],
    }


@torch.no_grad()
def alone(model: Any, docs: list[torch.Tensor]) -> torch.Tensor:
    """Logits ``[tokens, vocabulary]`` of each document by itself, end to end."""
    return torch.cat([model(input_ids=doc[None]).logits[0] for doc in docs])


@torch.no_grad()
def difference(model: Any, docs: list[torch.Tensor], expected: torch.Tensor) -> float:
    """The largest difference between a packed row's logits and the expected ones, as a share of the largest."""
    found = model(**packed(docs)).logits[0]
    return float((found - expected).abs().max() / expected.abs().max())
