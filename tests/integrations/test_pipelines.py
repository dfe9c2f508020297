"""Transformers' pipelines with ``batch_size``: padded batches computed packed, with the same scores and embeddings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tiny_hub import TEXTS, tiny_tokenizer

import fa2patch

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 400,
    "initializer_range": 0.3, "num_labels": 3, "pad_token_id": 2,
}  # fmt: skip
FAMILIES = {
    "bert": ("Bert", transformers.BertConfig(**SIZES)),
    "modernbert": ("ModernBert", transformers.ModernBertConfig(**SIZES, cls_token_id=0, sep_token_id=1)),
}
TASKS = {"text-classification": "ForSequenceClassification", "feature-extraction": "Model"}


def computed(pipe: Any, layer: torch.nn.Module) -> tuple[list[Any], int]:
    # What the pipeline returns for texts of many lengths, and the number of tokens that the layer computed.
    tokens: list[int] = []
    hook = layer.register_forward_pre_hook(lambda layer, args: tokens.append(args[0][..., 0].numel()))
    found = pipe([text * (number % 4 + 1) for number, text in enumerate(TEXTS[:32])], batch_size=8)
    hook.remove()
    return found, sum(tokens)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("task", TASKS)
def test_a_pipeline_computes_no_padding(family: str, task: str) -> None:
    name, config = FAMILIES[family]
    model = getattr(transformers, name + TASKS[task])(config).eval()
    pipe = transformers.pipeline(task, model=model, tokenizer=tiny_tokenizer(), device="cpu")
    layer = next(
        module for path, module in model.named_modules() if path.endswith("layers.0") or path.endswith("layer.0")
    )
    expected, padded = computed(pipe, layer)
    fa2patch.apply(model, padded_batches=True, prove=False)  # a proof would compute more tokens
    found, packed = computed(pipe, layer)
    assert packed < 0.75 * padded
    for ours, theirs in zip(found, expected):
        if task == "text-classification":
            assert ours["label"] == theirs["label"] and ours["score"] == pytest.approx(theirs["score"], rel=1e-5)
        else:
            mine, other = torch.tensor(ours)[0], torch.tensor(theirs)[0]
            real = mine.abs().sum(1) > 0  # padding is zeros, and it is on the right
            assert int(real.sum()) > 0 and real[: int(real.sum())].all()
            torch.testing.assert_close(mine[real], other[real], rtol=1e-4, atol=1e-5)
