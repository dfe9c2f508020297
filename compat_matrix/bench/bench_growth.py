"""How what fa2patch does grows with its input. Ten times the input must not take much more than ten times as long."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import fa2patch
from fa2patch import packing
from fa2patch.documents.find import find_boundaries
from fa2patch.documents.given_boundaries import from_cu_seqlens

from .workloads import FLAN, small_llama

LENGTH = 100  # tokens of each document of a row


def ids_of(tokens: int) -> torch.Tensor:
    return (torch.arange(tokens) % LENGTH)[None]


def from_ids(tokens: int, masked: bool = False) -> Callable[[], Any]:
    ids, mask = ids_of(tokens), torch.ones(1, tokens, dtype=torch.int64) if masked else None
    return lambda: find_boundaries((1, tokens), ids.device, position_ids=ids, attention_mask=mask)


def from_lengths(tokens: int) -> Callable[[], Any]:
    ids, cu = ids_of(tokens), torch.arange(0, tokens + 1, LENGTH, dtype=torch.int32)
    return lambda: from_cu_seqlens(cu, LENGTH, (1, tokens), position_ids=ids)


def plan(count: int) -> Callable[[], Any]:
    lengths = np.array(FLAN.draw(count))
    return lambda: packing.plan(lengths, 4096)


def with_modules(modules: int) -> Any:
    model = small_llama(2, 64).eval()
    model.more = torch.nn.ModuleList(torch.nn.Identity() for _ in range(modules))
    return model


def apply_to_modules(modules: int) -> Callable[[], Any]:
    model = with_modules(modules)
    return lambda: fa2patch.revert(fa2patch.apply(model).model)


def forward_with_modules(modules: int) -> Callable[[], Any]:
    model = with_modules(modules)
    fa2patch.apply(model)
    ids = torch.arange(16) % 8
    return torch.no_grad()(lambda: model(input_ids=ids[None] + 3, position_ids=ids[None]))


def apply_to_experts(layers: int) -> Callable[[], Any]:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = MixtralConfig(num_hidden_layers=layers, num_local_experts=512, vocab_size=64, **sizes)
    with torch.device("meta"):
        model = MixtralForCausalLM(config)
    return lambda: fa2patch.revert(fa2patch.apply(model).model)


# what grows, to what number
GROWS: dict[str, tuple[Callable[[int], Callable[[], Any]], int]] = {
    "tokens with position ids": (from_ids, 1_000_000),
    "tokens with position ids and a mask of ones": (partial(from_ids, masked=True), 1_000_000),
    "tokens with the collator's lengths": (from_lengths, 1_000_000),
    "examples in a plan": (plan, 10_000_000),
    "modules in a forward": (forward_with_modules, 78_000),
    "modules in apply": (apply_to_modules, 78_000),
    "layers of 512 experts in apply": (apply_to_experts, 200),
}


@pytest.mark.parametrize("what", GROWS)
def bench_growth(rows: list[Any], quick: bool, what: str) -> None:
    """What ten times the input costs: tokens, examples, modules, layers.

    Milliseconds of processor time, the least of 5 runs, at a tenth of the number and at the number itself, in turns.
    *Times as long* is their ratio: 10 is linear, and 1 does not depend on the number. Documents have 100 tokens.
    """
    make, number = GROWS[what]
    number = max(20, number // 1000) if quick else number
    runs = {count: make(count) for count in (number // 10, number)}
    taken: dict[int, list[float]] = {count: [] for count in runs}
    for _ in range(2 if quick else 6):  # the first is a warm-up
        for count, run in runs.items():
            started = time.process_time()
            run()
            taken[count].append(1e3 * (time.process_time() - started))
    few, many = (min(found[1:]) for found in taken.values())
    row = {"what": what, "number": number, "a tenth, ms": round(few, 3), "the number, ms": round(many, 3)}
    rows.append({**row, "times as long": round(many / max(few, 1e-3), 1)})
