"""Time encode and a training step of sentence-transformers in this environment, unpatched and patched, in turns."""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable

import sentence_transformers
import torch
from sentence_transformers import SentenceTransformer, models
from sentence_transformers.losses import MultipleNegativesRankingLoss
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordLevel
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

import fa2patch

from . import timing
from .lengths import Distribution

DISTRIBUTIONS = (Distribution("sentences", 24, 0.6, 128), Distribution("passages", 140, 0.6, 500))
WORDS = 2000
SIZE = {"layers": 4, "hidden": 256, "texts": 128, "batch": 32, "pairs": 16, "repeats": 7}
QUICK = {"layers": 1, "hidden": 32, "texts": 6, "batch": 3, "pairs": 2, "repeats": 1}


def main() -> None:
    """Print how much is done after each measurement, and the result in the last line, all as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only see that it runs")
    size = QUICK if parser.parse_args().quick else SIZE
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        _write(folder, size)
        rivals = {name: _loaded(folder) for name in ("padded", "patched")}
    fa2patch.apply(rivals["patched"])
    asked = [(distribution, what) for distribution in DISTRIBUTIONS for what in STEPS]
    rows = []
    for distribution, what in asked:
        rows.append(measured(rivals, distribution, what, size))
        print(json.dumps({"done": len(rows), "total": len(asked)}), flush=True)
    found = {"rows": rows, **size, "dtype": "float32", "sentence_transformers": sentence_transformers.__version__}
    print(json.dumps({**found, "toy": size is QUICK}))


def measured(rivals: dict[str, Any], distribution: Distribution, what: str, size: dict[str, int]) -> dict[str, Any]:
    """Return tokens and median milliseconds of each rival, and the median ratio of times."""
    words = [length - 2 for length in distribution.draw(size["texts"])]  # [CLS] and [SEP] are tokens, too
    drawn = torch.Generator().manual_seed(0)
    texts = [" ".join(f"w{n}" for n in torch.randint(WORDS, (max(1, each),), generator=drawn)) for each in words]
    steps = {name: STEPS[what](model, texts, size) for name, model in rivals.items()}
    found: dict[str, Any] = {"texts": distribution.name, "what": what}
    for name, model in rivals.items():
        found[name] = {"tokens": _tokens(model, steps[name])}
    taken = timing.rounds(steps, size["repeats"], warm_up=1)
    for name in rivals:
        found[name].update(timing.summary(taken[name]))
    ratios = [padded / patched for padded, patched in zip(taken["padded"], taken["patched"])]
    return {**found, "padded_by_patched": round(statistics.median(ratios), 3)}


def _encode(model: Any, texts: list[str], size: dict[str, int]) -> Callable[[], Any]:
    return lambda: model.encode(texts, batch_size=size["batch"], show_progress_bar=False)


def _train(model: Any, texts: list[str], size: dict[str, int]) -> Callable[[], Any]:
    """A step on pairs: forward and backward of the loss."""
    sides = [model.preprocess(texts[at * size["pairs"] :][: size["pairs"]]) for at in (0, 1)]
    loss = MultipleNegativesRankingLoss(model)

    def step() -> None:
        model.train()
        loss([dict(side) for side in sides], None).backward()
        model.zero_grad()

    return step


STEPS = {"encode": _encode, "training step": _train}


def _tokens(model: Any, step: Callable[[], Any]) -> int:
    """Return the number of tokens that a layer computes in a step."""
    seen: list[int] = []
    linear = next(module for module in model[0].modules() if isinstance(module, torch.nn.Linear))
    handle = linear.register_forward_pre_hook(lambda module, args: seen.append(args[0][..., 0].numel()))
    step()
    handle.remove()
    return sum(seen)


def _write(folder: str, size: dict[str, int]) -> None:
    """Write a BERT with random weights and a tokenizer that makes a token of each word."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {word: at for at, word in enumerate([*special, *(f"w{n}" for n in range(WORDS))])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=size["hidden"],
        intermediate_size=4 * size["hidden"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["hidden"] // 32,
    )
    BertModel(config).save_pretrained(Path(folder))


def _loaded(folder: str) -> Any:
    inner = models.Transformer(folder, max_seq_length=512)
    pooling = models.Pooling(inner.get_word_embedding_dimension())
    return SentenceTransformer(modules=[inner, pooling], device="cpu")


if __name__ == "__main__":
    sys.exit(main())
