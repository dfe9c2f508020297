"""The article that brought packing with position ids: huggingface.co/blog/packing-with-FA2, 21 August 2024.

Its two examples are in docs/migrate.md, and test_snippets.py runs them. Its batch of four sequences is that of the
article's draft; the published article shows it as a picture.
"""

import hashlib

import pytest
import torch
import transformers
from snippets import ROOT, snippets
from stage import tiny_llama

import fa2patch

# The checksum (SHA-256) of each example's text in the article, and its first line.
EXAMPLES = {
    "fe1439b75bf491edbceb94a0c06dd125cedaeb167a4db7333b7e292d0f8df027": "# Example using DataCollatorWithFlattening",
    "a072ba43c7a03052fe6066a1c3826c82885ae40067c2dc6a09312a67f654dacc": "# SFTTrainer example using DataCollatorForCompletionOnlyLM",  # noqa: E501
}

ADDED = "import fa2patch; fa2patch.apply(model)  # added\n"
OTHER_FOLDER = ('output_dir="save/path"', 'output_dir="/save/path"')

SEQUENCES = [
    [10, 11, 12, 13],
    [20, 21, 22, 23, 24, 25, 26, 27],
    [30, 31, 32, 33, 34],
    [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 401],
]
INPUT_IDS = [
    [10, 11, 12, 13, 20, 21, 22, 23, 24, 25, 26, 27, 30, 31, 32, 33, 34, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 401]
]
LABELS = [[
    -100, 11, 12, 13, -100, 21, 22, 23, 24, 25, 26, 27, -100, 31, 32, 33, 34,
    -100, 41, 42, 43, 44, 45, 46, 47, 48, 49, 401,
]]  # fmt: skip
POSITION_IDS = [[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]


@pytest.mark.parametrize("checksum, first_line", EXAMPLES.items(), ids=["Trainer", "SFTTrainer"])
def test_the_page_has_the_articles_text(checksum, first_line):
    found = [one.code for one in snippets(ROOT / "docs/migrate.md") if one.code.startswith(first_line + "\n")]
    assert len(found) == 1 and found[0].count(ADDED) == 1
    text = found[0].replace(ADDED, "").replace(*OTHER_FOLDER)
    assert hashlib.sha256(text.encode()).hexdigest() == checksum


COLLATORS = [
    one.DataCollatorWithFlattening for one in (fa2patch, transformers) if hasattr(one, "DataCollatorWithFlattening")
]


@pytest.mark.parametrize("collator", COLLATORS, ids=lambda one: one.__module__.partition(".")[0])
def test_the_articles_batch(collator):
    batch = collator()([{"input_ids": one} for one in SEQUENCES])
    assert batch["input_ids"].tolist() == INPUT_IDS
    assert batch["labels"].tolist() == LABELS
    assert batch["position_ids"].tolist() == POSITION_IDS


def test_a_model_computes_the_articles_sequences_apart():
    model = tiny_llama().eval()
    alone = [model(input_ids=torch.tensor([one])).logits[0] for one in SEQUENCES]
    fa2patch.apply(model)
    batch = fa2patch.DataCollatorWithFlattening()([{"input_ids": one} for one in SEQUENCES])
    found = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits[0]
    assert torch.allclose(found, torch.cat(alone), atol=1e-5)
    cu = fa2patch.boundaries(batch["position_ids"]).cu_seqlens
    assert cu.tolist() == [0, 4, 12, 17, 28]
