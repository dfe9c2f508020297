"""Part ``collator``: a batch by fa2patch's DataCollatorWithFlattening and by Transformers' class of the same name."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass
from typing import Any, Callable

import numpy as np
import torch
from rich.progress import Progress

import fa2patch

from . import timing

KINDS: dict[str, Callable[[Any], Any]] = {"lists": list, "arrays": np.array, "tensors": torch.tensor}
TOKENS_IN_A_ROUND = 20_000
"""A collator is called again in a round until it has had about so many tokens, because one call may be too short."""

LENGTHS = {"return_flash_attn_kwargs": True, "return_seq_idx": True}
COLUMNS = {
    "ids": ("input_ids",),
    "ids, labels": ("input_ids", "labels"),
    "ids, labels, mask": ("input_ids", "labels", "attention_mask"),
    "ids, labels, mask, positions, weights": ("input_ids", "labels", "attention_mask", "position_ids", "weights"),
}


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        kind: what holds the numbers of an example.
        columns: a name of :data:`COLUMNS`.
        examples, tokens: examples in the batch, and the mean number of tokens in each.
        lengths: whether both collators return the lengths and ``seq_idx``.
    """

    kind: str
    columns: str
    examples: int
    tokens: int
    lengths: bool = False


CASES = [
    Case(kind, *case)
    for kind in KINDS
    for case in (
        ("ids", 4, 32),
        ("ids, labels", 4, 32, True),
        ("ids", 256, 32),
        ("ids, labels, mask", 32, 300),
        ("ids, labels, mask, positions, weights", 32, 300, True),
        ("ids", 256, 2048),
    )
]


def features(case: Case) -> list[dict[str, Any]]:
    """Return the examples of a case. Each has half to one and a half times the mean number of tokens."""
    draw = random.Random(0)
    made = []
    for _ in range(case.examples):
        length = draw.randint(case.tokens // 2, case.tokens * 3 // 2)
        example: dict[str, list[Any]] = {
            "input_ids": [draw.randrange(32_000) for _ in range(length)],
            "labels": [-100] * (length // 2) + [draw.randrange(32_000) for _ in range(length - length // 2)],
            "attention_mask": [1] * length,
            "position_ids": list(range(length)),
            "weights": [draw.random() for _ in range(length)],
        }
        made.append({name: KINDS[case.kind](example[name]) for name in COLUMNS[case.columns]})
    return made


def rivals(case: Case) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return the two collators' calls on the examples of a case."""
    from transformers import DataCollatorWithFlattening

    options = LENGTHS if case.lengths else {}
    examples = features(case)
    ours, theirs = fa2patch.DataCollatorWithFlattening(**options), DataCollatorWithFlattening(**options)
    return {"fa2patch": lambda: ours(examples), "upstream": lambda: theirs(examples)}


def measure(progress: Progress, quick: bool = False, repeats: int = 15) -> Any:
    """Measure all cases and return the result of the part."""
    cases = [case for case in CASES if case.tokens == 32] if quick else CASES
    repeats = 2 if quick else repeats
    task = progress.add_task("collator", total=len(cases))
    rows = []
    for case in cases:
        calls = 1 if quick else max(1, TOKENS_IN_A_ROUND // (case.examples * case.tokens))
        rows.append({**vars(case), **compared(case, repeats, calls)})
        progress.update(task, advance=1)
    return {"rows": rows, "repeats": repeats}


def compared(case: Case, repeats: int, calls: int) -> dict[str, Any]:
    """Return each collator's microseconds per example and the ratio of ours to upstream's, as medians over rounds.

    Args:
        case: the examples and options.
        repeats: the number of rounds.
        calls: the calls of each collator in a round.
    """

    def repeated(call: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(calls):
                call()

        return run

    taken = timing.rounds({name: repeated(call) for name, call in rivals(case).items()}, repeats)
    found = {
        f"{name}_us": round(1e6 * statistics.median(seconds) / calls / case.examples, 3)
        for name, seconds in taken.items()
    }
    ratios = [ours / theirs for ours, theirs in zip(taken["fa2patch"], taken["upstream"])]
    return {**found, "ratio": round(statistics.median(ratios), 3)}
