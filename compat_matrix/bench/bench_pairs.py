"""Encoder-decoders on packed pairs: what the patch adds to a layer, and a step beside padding and its limit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fa2patch
from fa2patch.documents.boundaries import Boundaries
from fa2patch.documents.tensors import ends_of
from fa2patch.kernels import Options
from fa2patch.kernels.reference import Reference

from ..check.reads import calls, counted
from . import operators
from .workloads import BY_HAND, ByHand, documents

SOURCES, TARGETS = (7, 5, 1, 9, 6), (4, 8, 3, 1, 5)
WAYS = {"position_ids only": False, "the collator's lengths": True}

Lengths = tuple[list[int], list[int]]


def translation(count: int, seed: int = 0) -> Lengths:
    drawn = np.random.default_rng(seed)
    sources = np.clip(24 * np.exp(0.65 * drawn.standard_normal(count)), 3, 256)
    targets = np.clip(sources * np.exp(0.2 * drawn.standard_normal(count)), 3, 256)
    return [*map(int, sources)], [*map(int, targets)]


def summarisation(count: int, seed: int = 0) -> Lengths:
    drawn = np.random.default_rng(seed)
    sources = np.clip(700 * np.exp(0.45 * drawn.standard_normal(count)), 30, 1024)
    targets = np.clip(65 * np.exp(0.4 * drawn.standard_normal(count)), 8, 142)
    return [*map(int, sources)], [*map(int, targets)]


# Lengths that are like those of translation and of summarisation, and the pairs of a batch
LENGTHS = {"translation": (translation, 32), "summarisation": (summarisation, 4)}


# --- models and batches ---------------------------------------------------------------------------------------


def bart(layers: int, hidden: int, implementation: str = "sdpa") -> Any:
    from transformers import BartConfig, BartForConditionalGeneration

    sizes = {f"{stack}_{name}": value for stack in ("encoder", "decoder") for name, value in (
        ("layers", layers), ("attention_heads", hidden // 32), ("ffn_dim", 4 * hidden)
    )}  # fmt: skip
    config = BartConfig(
        vocab_size=512, d_model=hidden, max_position_embeddings=4096, use_cache=False, forced_eos_token_id=None,
        dropout=0.0, **sizes,
    )  # fmt: skip
    return _made(BartForConditionalGeneration, config, implementation)


def t5(layers: int, hidden: int, implementation: str = "sdpa") -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=512, d_model=hidden, d_kv=32, d_ff=4 * hidden, num_layers=layers, num_heads=hidden // 32,
        dropout_rate=0.0, use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    return _made(T5ForConditionalGeneration, config, implementation)


def _made(cls: Any, config: Any, implementation: str) -> Any:
    torch.manual_seed(0)
    return cls._from_config(config, attn_implementation=implementation).train()


MODELS = {"BART": bart, "T5": t5}


def packed(lengths: Lengths, with_lengths: bool) -> dict[str, Any]:
    sources, targets = documents(lengths[0], seed=1), documents(lengths[1], seed=2)
    collate = fa2patch.DataCollatorForSeq2Seq(return_flash_attn_kwargs=with_lengths)
    return collate([{"input_ids": source, "labels": target} for source, target in zip(sources, targets)])


def padded(lengths: Lengths) -> dict[str, Any]:
    sources, targets = (
        torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(row) for row in documents(side, seed=seed)], batch_first=True, padding_value=value
        )
        for side, seed, value in zip(lengths, (1, 2), (0, -100))
    )
    return {"input_ids": sources, "attention_mask": (sources != 0).long(), "labels": targets}


class PairsByHand(ByHand):
    """Every layer of BART calls ``kernel`` with precomputed boundaries of its own."""

    def __init__(self, kernel: Any, lengths: Lengths) -> None:
        super().__init__(kernel)
        sources, targets = (
            Boundaries(ends_of(side, torch.device("cpu")), max(side), _lengths=tuple(side)) for side in lengths
        )
        cross = Boundaries(targets.cu_seqlens, targets.max_seqlen, _lengths=targets._lengths, sources=sources)
        self.of = {(False, False): sources, (True, True): targets, (True, False): cross}

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        self.boundaries = self.of[module.is_decoder, module.is_causal]
        q, k, v = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
        asked = Options(scale=options.get("scaling"), causal=module.is_causal)
        return self.kernel(q, k, v, self.boundaries, asked)[None], None


def pair_by_pair(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pairs: Boundaries, options: Options
) -> torch.Tensor:
    of_keys = (pairs.sources or pairs).lengths
    states = (
        torch.split(x.transpose(0, 1), lengths, 1) for x, lengths in zip((q, k, v), (pairs.lengths, of_keys, of_keys))
    )
    outputs = [
        F.scaled_dot_product_attention(*(x[None] for x in one), is_causal=options.causal, scale=options.scale)[0]
        for one in zip(*states)
    ]
    return torch.cat(outputs, dim=1).transpose(0, 1)


# --- counts ---------------------------------------------------------------------------------------------------


def counts(layers: int, with_lengths: bool) -> dict[str, int]:
    # Those of a patched BART beyond those of one with the kernel called by hand, by what is counted
    lengths = list(SOURCES), list(TARGETS)
    batch = packed(lengths, with_lengths)
    known = {name: value for name, value in batch.items() if name in ("input_ids", "labels")}
    PairsByHand(Reference(), lengths)
    by_hand, patched = bart(layers, 64, BY_HAND), bart(layers, 64)
    fa2patch.apply(patched, kernel="reference", prove=False)
    found: dict[str, list[int]] = {}
    for model, given in ((by_hand, known), (patched, batch), (patched, batch)):

        def step(model: Any = model, given: Any = given) -> None:
            model(**given).loss.backward()

        def forward(model: Any = model, given: Any = given) -> None:
            with torch.no_grad():
                model(**given)

        for run in (forward, step, forward, step):
            run()  # some checks are made only once for each model
        for name, run in (("forward", forward), ("step", step)):
            with operators.counted() as seen:
                run()
            found.setdefault(f"operators, {name}", []).append(sum(seen.values()))
            found.setdefault(f"calls, {name}", []).append(sum(calls(run).values()))
    with counted() as reads:
        patched(**batch)
    return {name: ours - hand for name, (hand, _, ours) in found.items()} | {"reads": reads.reads}


def bench_pair_counts(rows: list[Any], quick: bool) -> None:
    """What a packed forward of an encoder-decoder has beyond the same model with the kernel called by hand.

    A BART of 2 and 2, and of 4 and 4 layers, on five pairs. *A layer* is one of the encoder and one of the decoder,
    with three attentions. *Operators* are those that torch dispatches, without views and allocations, *calls* those of
    Python. *Step*: forward and backward. *Reads*: from the device in a forward. The counts are the same on any machine.
    By hand, boundaries are at hand, positions do not restart and labels are shifted over the row: a forward beyond its
    layers finds them, restarts them and shifts by document.
    """
    for way, with_lengths in WAYS.items():
        few, many = (counts(layers, with_lengths) for layers in (2, 4))
        by_layer = {name: (many[name] - few[name]) / 2 for name in few}
        rows.append({"what": f"a layer, {way}", **{name: round(value, 1) for name, value in by_layer.items()}})
        beyond = {name: round(few[name] - 2 * by_layer[name]) for name in few}
        rows.append({"what": f"a forward beyond its layers, {way}", **beyond})


# --- times ----------------------------------------------------------------------------------------------------


def steps(kind: str, lengths: Lengths, layers: int, hidden: int) -> dict[str, Callable[[], Any]]:
    make, count = MODELS[kind], len(lengths[0])
    even = [sum(lengths[0]) // count] * count, [sum(lengths[1]) // count] * count
    model, patched, other = (make(layers, hidden) for _ in range(3))
    if kind == "T5":
        without_bias(other)
    for each in (patched, other):
        fa2patch.apply(each, prove=False)  # as with evidence of it: a proof is no cost of a step

    def step(model: Any, batch: dict[str, Any]) -> None:
        model(**batch).loss.backward()
        model.zero_grad()

    full = padded(even)
    del full["attention_mask"]
    runs = {
        "fa2patch": partial(step, patched, packed(lengths, True)),
        "padded": partial(step, model, padded(lengths)),
        "even pairs": partial(step, patched, packed(even, True)),
        "even pairs, dense": partial(step, model, full),
    }
    if kind == "T5":
        runs["without bias"] = partial(step, other, packed(lengths, True))
    else:
        PairsByHand(pair_by_pair, lengths)
        known = {name: value for name, value in packed(lengths, False).items() if name in ("input_ids", "labels")}
        runs["SDPA by hand"] = partial(step, make(layers, hidden, BY_HAND), known)
    return runs


def without_bias(model: Any) -> None:
    for stack in (model.encoder, model.decoder):
        attention = stack.block[0].layer[0].SelfAttention
        attention.has_relative_attention_bias = False
        del attention.relative_attention_bias


@pytest.mark.parametrize("of", LENGTHS)
@pytest.mark.parametrize("kind", MODELS)
def bench_pairs(rows: list[Any], turns: Any, quick: bool, kind: str, of: str) -> None:
    """A step of an encoder-decoder on packed pairs, beside padding and its limit.

    Forward and backward of a BART and a T5 of 3 and 3 layers, hidden size 256, float32, with the collator's lengths: 32
    pairs as in translation (sources of 24 tokens in the middle, drawn lognormally with sigma 0.65), 4 as in
    summarisation (700 and 65 tokens). Ratios are fa2patch's time by a rival's in the same round, the median of 5
    rounds. *Limit*: padded tokens by real ones, of both sides. *Share of it*: how many times as fast as padded, by the
    limit. *Even*: pairs of one length, packed, by the same pairs as a batch that has no padding; a layer of such a
    batch does nothing for padding. *To SDPA by hand*: each pair's attention called by hand, without anything to find or
    to check. *To no bias*: the same T5 without its position bias.
    """
    draw, count = LENGTHS[of]
    lengths = draw(count)
    runs = steps(kind, lengths, *((1, 64) if quick else (3, 256)))
    for run in (*runs.values(), *runs.values()):
        run()  # some checks are made only once for each model
    taken = turns(runs, 1 if quick else 5, warm_up=1)
    most = sum(len(side) * max(side) for side in lengths) / sum(map(sum, lengths))
    faster = taken.ratio("padded", "fa2patch")
    row = {
        "model": kind,
        "lengths": of,
        "fa2patch, ms": round(taken.ms("fa2patch")),
        "to padded": taken.ratio("fa2patch", "padded"),
    }
    row |= {"limit": round(most, 2), "share of it": f"{faster / most:.0%}"}
    row["even, to dense"] = taken.ratio("even pairs", "even pairs, dense")
    for name, column in (("SDPA by hand", "to SDPA by hand"), ("without bias", "to no bias")):
        row[column] = taken.ratio("fa2patch", name) if name in runs else ""
    rows.append(row)
