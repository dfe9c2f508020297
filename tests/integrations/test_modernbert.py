"""ModernBERT's unpadding, which Transformers took out in 5.1: the figure of docs/stack/sentence_transformers.md."""

from __future__ import annotations

import pytest
import torch
import transformers

import fa2patch

LENGTHS = (5, 9, 12, 18, 23, 30, 38, 64)

if not hasattr(transformers, "ModernBertModel"):
    pytest.skip("this Transformers has no ModernBERT", allow_module_level=True)


def embedded(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, set[int]]:
    # The mean of each text's hidden states, as sentence-transformers pools, and the tokens of each layer's calls.
    seen: set[int] = set()
    hooks = [
        layer.register_forward_pre_hook(lambda layer, args: seen.add(args[0][..., 0].numel())) for layer in model.layers
    ]
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    for hook in hooks:
        hook.remove()
    real = batch["attention_mask"][..., None]
    return (hidden * real).sum(1) / real.sum(1), seen


def test_modernbert_computes_the_tokens_of_its_texts_again():
    torch.manual_seed(0)
    config = transformers.ModernBertConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        initializer_range=0.3, pad_token_id=0, cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    model = transformers.ModernBertModel(config).double().eval()
    real = torch.arange(64) < torch.tensor(LENGTHS)[:, None]
    batch = {"input_ids": torch.randint(3, 300, (8, 64)) * real, "attention_mask": real.long()}
    expected, padded = embedded(model, batch)
    fa2patch.apply(model, padded_batches=True, prove=False)  # a proof would compute more tokens
    found, packed = embedded(model, batch)
    assert (padded, packed) == ({512}, {199})
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-7)
