"""Llamas to measure: small ones, and one that calls a kernel without fa2patch."""

from __future__ import annotations

from typing import Any

import torch

from fa2patch.documents.boundaries import Boundaries
from fa2patch.kernels.attention import Options

BY_HAND = "fa2patch_bench_by_hand"


def small_llama(layers: int, hidden: int, implementation: str = "sdpa", vocabulary: int = 512, seed: int = 0) -> Any:
    """Build a float32 Llama in train mode: heads of 32 dimensions, half as many key heads, weights from the seed."""
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
    """The lowest possible cost of a packed batch: every layer calls ``kernel`` with precomputed boundaries.

    It uses Transformers' own registries of attention and mask functions (4.53 on) and adds nothing else. Set
    ``boundaries`` and load a model with ``BY_HAND`` as its attention. It is for measurements only and cannot compute
    any other batch.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.boundaries: Boundaries | None = None

    def register(self) -> None:
        """Register this object with Transformers under the name ``BY_HAND``."""
        from transformers import AttentionInterface, AttentionMaskInterface

        AttentionInterface.register(BY_HAND, self.attend)
        AttentionMaskInterface.register(BY_HAND, lambda *unused, **ignored: None)

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        """Compute attention of q, k and v ``[1, heads, length, dim]``; return ``[1, length, heads, dim]`` and None."""
        q, k, v = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
        asked = Options(scale=options.get("scaling"), window=options.get("sliding_window"))
        return self.kernel(q, k, v, self.boundaries, asked)[None], None
