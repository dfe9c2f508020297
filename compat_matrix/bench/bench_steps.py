"""A whole training step on documents of one kind of lengths, beside every other way that a CPU can compute it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fa2patch
from fa2patch.documents.boundaries import Boundaries
from fa2patch.kernels import Options

from .. import environments
from ..check.reads import calls
from . import operators, workloads
from .bench_times import MOST_PADDING, layouts
from .workloads import BY_HAND, DISTRIBUTIONS, ByHand, packed, padded, small_llama

TOKENS = 2048
# the numbers of documents of equal length, beside which lengths are drawn
EQUAL = (64, 512, 2048, 1)


def kinds(tokens: int) -> dict[str, list[int]]:
    drawn = {name: workloads.cut(each.scaled(0.25).draw(tokens), tokens) for name, each in DISTRIBUTIONS.items()}
    drawn["uniform, 1 to 64"] = workloads.cut(layouts()["uniform, 1 to 64"], tokens)
    return drawn | {f"{count} x {tokens // count}": [tokens // count] * count for count in EQUAL if count <= tokens}


def one_by_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Boundaries, options: Options
) -> torch.Tensor:
    # Documents of one length need one call.
    lengths = documents.lengths
    if len({*lengths}) == 1:
        states = [x.view(len(lengths), lengths[0], *x.shape[1:]).transpose(1, 2) for x in (q, k, v)]
        found = F.scaled_dot_product_attention(*states, is_causal=True, enable_gqa=True, scale=options.scale)
        return found.transpose(1, 2).flatten(0, 1)
    outputs = [
        F.scaled_dot_product_attention(*(x[None] for x in one), is_causal=True, enable_gqa=True, scale=options.scale)[0]
        for one in zip(*(torch.split(x.transpose(0, 1), lengths, dim=1) for x in (q, k, v)))
    ]
    return torch.cat(outputs, dim=1).transpose(0, 1)


def steps(lengths: list[int], layers: int, hidden: int, only: str = "") -> dict[str, Callable[[], Any]]:
    # Padding of more than MOST_PADDING times the tokens is left out. only: the one rival that is made
    docs = workloads.documents(lengths)
    ByHand(one_by_one, workloads.boundaries_of(lengths))
    batches: dict[str, Callable[[], dict[str, Any]]] = {
        "fa2patch": lambda: packed(docs, lengths=True),
        "SDPA by hand": lambda: packed(docs),
        "upstream, packed": lambda: packed(docs),
    }
    if len(lengths) * max(lengths) <= MOST_PADDING * sum(lengths):
        batches["padded"] = lambda: padded(docs)

    def step(model: Any, batch: dict[str, Any]) -> None:
        model(**batch).loss.backward()
        model.zero_grad()

    made = {}
    for name in [only] if only else batches:
        model = small_llama(layers, hidden, BY_HAND if name == "SDPA by hand" else "sdpa")
        if name == "fa2patch":
            fa2patch.apply(model)
        made[name] = partial(step, model, batches[name]())
    return made


@pytest.mark.parametrize("kind", kinds(TOKENS))
def bench_steps(rows: list[Any], turns: Any, quick: bool, kind: str) -> None:
    """A whole step beside the best that a CPU has: SDPA called by hand, Transformers' own packing, and padding.

    Forward and backward of a Llama of 4 layers, hidden size 256, float32, on 2048 tokens, with the collator's lengths.
    Ratios are fa2patch's time by a rival's in the same round: the median of 9 rounds, and between which values half of
    them lie. *Operators* and *calls* (of Python) are fa2patch's beyond those of SDPA called by hand, which has no
    boundaries to find and nothing to check. *Limit*: padded tokens by real ones. FlexAttention has no backward on a
    CPU, and NestedTensor no causal attention.
    """
    tokens, size = (64, (1, 64)) if quick else (TOKENS, (4, 256))
    lengths = kinds(tokens).get(kind, [1] * tokens)
    runs = steps(lengths, *size)
    for run in (*runs.values(), *runs.values()):
        run()  # some checks are made only once for each model
    counted = {}
    for name in ("fa2patch", "SDPA by hand"):
        with operators.counted() as found:
            runs[name]()
        counted[name] = sum(found.values()), sum(calls(runs[name]).values())
    taken = turns(runs, 1 if quick else 9, warm_up=1)
    row: dict[str, Any] = {"documents": kind, "limit": round(workloads.padding_ratio([lengths]), 2)}
    for name in ("SDPA by hand", "upstream, packed", "padded"):
        row[f"to {name}"] = taken.ratio("fa2patch", name) if name in runs else ""
        ratios = np.divide(taken["fa2patch"], taken[name]) if name in runs else np.ones(1)
        first, last = np.percentile(ratios, (25, 75)).round(2).tolist()
        row[f"to {name}, range"] = f"{first} to {last}" if name in runs else ""
    more = np.subtract(counted["fa2patch"], counted["SDPA by hand"]).tolist()
    rows.append({**row, "operators more": more[0], "calls more": more[1]})


@pytest.mark.parametrize("kind", kinds(TOKENS))
def bench_memory(rows: list[Any], quick: bool, kind: str) -> None:
    """The peak of memory of a whole step beside Transformers' own packing and padding.

    What forward and backward have in use at their peak beyond what was in use before, in MB; for each, a process of its
    own, which takes one step. Model and documents are those of the part *steps*.
    """
    tokens, size = (64, (1, 64)) if quick else (TOKENS, (4, 256))
    if kind not in kinds(tokens):
        return
    row: dict[str, Any] = {"documents": kind}
    lengths = kinds(tokens)[kind]
    for rival in ("fa2patch", "upstream, packed", "padded"):
        row[f"{rival}, MB"] = ""
        if rival != "padded" or len(lengths) * max(lengths) <= MOST_PADDING * sum(lengths):
            peak = environments.printed("compat_matrix.bench.bench_steps", kind, rival, *map(str, (tokens, *size)))
            row[f"{rival}, MB"] = round(int(peak) / 1e6, 1)
    rows.append(row)


def main(kind: str, rival: str, tokens: str, layers: str, hidden: str) -> None:
    torch.set_num_threads(1)
    print(workloads.peak_of(steps(kinds(int(tokens))[kind], int(layers), int(hidden), only=rival)[rival]))


if __name__ == "__main__":
    main(*sys.argv[1:])
