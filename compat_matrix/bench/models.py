"""Llamas to measure: small ones, and a way to call a kernel from one by hand."""

from __future__ import annotations

from typing import Any

import torch

from fa2patch.documents.boundaries import Boundaries
from fa2patch.kernels.attention import Options

BY_HAND = "fa2patch_bench_by_hand"


def small_llama(layers: int, hidden: int, implementation: str = "sdpa", vocabulary: int = 512, seed: int = 0) -> Any:
    """Heads of 32 dimensions, half as many of keys; the same weights for the same seed; float32, in train mode."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = hidden // 32
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 16 * 16,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        max_position_embeddings=4096,
        use_cache=False,
    )
    return LlamaForCausalLM._from_config(config, attn_implementation=implementation).train()


class ByHand:
    """The least that a packed row can cost: every layer calls ``kernel`` with boundaries that were made beforehand.

    Through Transformers' own registries of attention and mask functions (4.53 on), nothing else around it: set
    ``boundaries``, load a model as ``BY_HAND``. For the measurement's model alone; it cannot take any other batch.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.boundaries: Boundaries | None = None

    def register(self) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface

        AttentionInterface.register(BY_HAND, self.attend)
        AttentionMaskInterface.register(BY_HAND, lambda *unused, **ignored: None)

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        """q, k and v ``[1, heads, length, dim]`` -> ``[1, length, heads, dim]``."""
        q, k, v = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
        asked = Options(scale=options.get("scaling"), window=options.get("sliding_window"))
        return self.kernel(q, k, v, self.boundaries, asked)[None], None
