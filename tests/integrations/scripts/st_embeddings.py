"""Embeddings of sentence-transformers unpatched and patched: ``st_embeddings.py FAMILY ATTENTION``.
The last line is a JSON object: the largest difference of each case by its name, and the tokens that were computed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import sentence_transformers
import torch
from sentence_transformers import SentenceTransformer, models
from st_folders import folder_of, real_tokens_of, sentence_transformer, texts, tokens_of

import fa2patch

POOLINGS = ("mean", "cls", "max", "weightedmean", "lasttoken")


def embedded(model: Any) -> dict[str, list[torch.Tensor]]:
    # Batches hold texts of mixed lengths, one text, or texts of one length.
    model.prompts["query"] = "w7 w8 "
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "normalized, batches of 4": {"normalize_embeddings": True, "batch_size": 4},
        "prompt": {"prompt": "w1 w2 w3 "},
        "named prompt": {"prompt_name": "query"},
    }
    found = {name: list(model.encode(texts(), convert_to_tensor=True, **given)) for name, given in options.items()}
    found["token embeddings"] = model.encode(texts(), output_value="token_embeddings")
    found["one text"] = [model.encode("w1 w2", convert_to_tensor=True)]
    found["no padding"] = list(model.encode(["w1 w2", "w3 w4"], convert_to_tensor=True))
    found["empty texts"] = list(model.encode(["", ""], convert_to_tensor=True))
    for pooling in POOLINGS:
        pooled = models.Pooling(32, pooling_mode=pooling, include_prompt=False)
        other = SentenceTransformer(modules=[model[0], pooled], device="cpu", truncate_dim=8)
        found[pooling] = list(other.encode(texts(), prompt="w5 ", convert_to_tensor=True))
    return found


def difference(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    # The difference is a part of the largest value.
    assert [each.shape for each in one] == [each.shape for each in other]
    scale = max(float(each.abs().max()) for each in other)
    assert scale > 0.01
    return max(float((a - b).abs().max()) for a, b in zip(one, other)) / scale


def main(family: str, attention: str) -> None:
    # Leaving the ``with`` block must give back the bits of before.
    with tempfile.TemporaryDirectory() as home:
        model = sentence_transformer(folder_of(family, Path(home)), attention=attention)
        seen, real = tokens_of(model), real_tokens_of(model)
        expected = embedded(model)
        padded = sum(seen)
        with fa2patch.apply(model):
            model.encode(texts())  # layers that fa2patch does not know are proven on the first batch, by more forwards
            seen.clear()
            real.clear()
            found = embedded(model)
            packed, of_texts = sum(seen), sum(real)
            verified = fa2patch.verify(model).ok
        after = embedded(model)
    assert fa2patch.status(model) is None
    assert all(torch.equal(a, b) for name in after for a, b in zip(after[name], expected[name]))
    result = {
        "version": sentence_transformers.__version__,
        "off": {name: difference(found[name], expected[name]) for name in expected},
        "tokens": {"packed": packed, "of texts": of_texts, "padded": padded},
        "different": len({tuple(each.tolist()) for each in expected["plain"]}),
        "verified": verified,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
