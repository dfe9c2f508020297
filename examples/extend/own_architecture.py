"""A row of the registry of your own: what cannot be found by looking at a modeling file.

    python examples/extend/own_architecture.py

Here a model type is refused for a setting of its config, and an option of its attention layers is put right.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rows import alone, difference, documents, model_of
from transformers import LlamaForCausalLM

import fa2patch
from fa2patch.kernels import Options


def refused(config: Any) -> str | None:
    """The reason why this config cannot be trained packed, or None."""
    return "its first tokens see all others" if getattr(config, "prefix_tokens", 0) else None


def adjusted(module: Any, options: Options) -> Options:
    """The options of an attention layer that are right. This one never uses a window beyond the longest position."""
    longest = module.config.max_position_embeddings
    return replace(options, window=None) if options.window is not None and options.window > longest else options


def main() -> None:
    fa2patch.register(fa2patch.Architecture("llama", refuse=refused, adjust=adjusted))
    model, docs = model_of(LlamaForCausalLM), documents()
    expected = alone(model, docs)
    with fa2patch.apply(model):
        print(f"difference {difference(model, docs, expected):.1e}")
    model.config.prefix_tokens = 3
    try:
        fa2patch.apply(model)
    except fa2patch.errors.UnsupportedModel as error:
        print(f"refused: {error}")
    finally:
        del model.config.prefix_tokens
        fa2patch.register(fa2patch.Architecture("llama"))


if __name__ == "__main__":
    main()
