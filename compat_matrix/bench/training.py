"""Part ``training``: the same mini-batches, padded and packed, through forward, backward and AdamW of a small Llama.

The rivals start from the same weights and take every step in turns, so that other load on the machine affects all of
them. Only real tokens are counted, never padding. The limit is the number of padded tokens per real token in these
mini-batches: work that does not grow with tokens (the optimizer) keeps the ratio below it, and work that grows faster
(attention over padding) raises it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Callable

import torch
from rich.progress import Progress

import fa2patch

from .lengths import DISTRIBUTIONS, Distribution, expected_padding_ratio, padding_ratio
from .models import small_llama

BATCH = 4
SCALE = 0.25
"""Documents are a quarter as long as the distributions' own, so that one thread trains within a minute."""

STEPS, QUICK_STEPS = 60, 2
LAYERS, HIDDEN = 4, 256
WARM_UP = 2
"""Untimed first steps, which also initialise allocators and the optimizer's states."""

RIVALS = ("padded", "fa2patch", "upstream")

Batch = dict[str, Any]


def measure(progress: Progress, quick: bool = False, steps: int = STEPS) -> Any:
    """Measure all distributions and return the result of the part."""
    steps = QUICK_STEPS if quick else steps
    scale, layers, hidden = (0.03, 1, 64) if quick else (SCALE, LAYERS, HIDDEN)
    task = progress.add_task("training", total=len(DISTRIBUTIONS) * (steps + WARM_UP))
    runs = [
        run(distribution.scaled(scale), steps, layers, hidden, lambda: progress.update(task, advance=1))
        for distribution in DISTRIBUTIONS.values()
    ]
    return {"batch": BATCH, "scale": scale, "layers": layers, "hidden_size": hidden, "dtype": "float32", "runs": runs}


def run(distribution: Distribution, steps: int, layers: int, hidden: int, advance: Callable[[], None]) -> Any:
    """Train all rivals in turns on one distribution."""
    lengths = draw(distribution, steps + WARM_UP)
    trainees = {name: _Trainee(name, layers, hidden) for name in RIVALS}
    for step, batch in enumerate(documents(lengths)):
        names = list(trainees)
        shift = step % len(names)
        for name in names[shift:] + names[:shift]:
            trainees[name].step(batch)
        advance()
    timed = lengths[WARM_UP:]
    return {
        "distribution": distribution.name,
        "steps": steps,
        "real_tokens": sum(map(sum, timed)),
        "limit": round(padding_ratio(timed), 4),
        "expected_limit": round(expected_padding_ratio(distribution.draw(20_000), BATCH), 4),
        "rivals": {name: trainee.found(trainees["padded"], timed) for name, trainee in trainees.items()},
    }


def draw(distribution: Distribution, steps: int, batch: int = BATCH, seed: int = 0) -> list[list[int]]:
    """Draw the document lengths of every mini-batch. Each document has at least two tokens, so that it has a target."""
    drawn = [max(2, length) for length in distribution.draw(steps * batch, seed)]
    return [drawn[start : start + batch] for start in range(0, len(drawn), batch)]


def documents(lengths: Sequence[Sequence[int]], vocabulary: int = 512, seed: int = 1) -> list[list[list[int]]]:
    """Return documents of random tokens with these lengths, mini-batch by mini-batch."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in batch] for batch in lengths
    ]


def padded(batch: Sequence[Sequence[int]]) -> Batch:
    """Return one row for each document, padded to the longest. Nothing predicts a row's first token: its label is
    -100.
    """
    rows = [torch.tensor(document) for document in batch]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, 0] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def packed(batch: Sequence[Sequence[int]], lengths: bool = False) -> Batch:
    """Return the collator's packed batch of the documents."""
    collate = fa2patch.DataCollatorWithFlattening(return_flash_attn_kwargs=lengths)
    return collate([{"input_ids": list(document)} for document in batch])


class _Trainee:
    def __init__(self, name: str, layers: int, hidden: int) -> None:
        self.model = small_llama(layers, hidden)
        self.collate = padded if name == "padded" else packed
        if name == "fa2patch":
            fa2patch.apply(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, documents: Sequence[Sequence[int]]) -> None:
        batch = self.collate(documents)
        started = time.perf_counter()
        loss = self.model(**batch, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - started)
        self.losses.append(loss.item())

    def found(self, padded: _Trainee, lengths: Sequence[Sequence[int]]) -> dict[str, Any]:
        seconds, beside = sum(self.seconds[WARM_UP:]), sum(padded.seconds[WARM_UP:])
        ratio = beside / seconds
        return {
            "real_tokens_per_second": round(sum(map(sum, lengths)) / seconds, 1),
            "ratio_to_padded": round(ratio, 4),
            "share_of_limit": round(ratio / padding_ratio(lengths), 4),
            "optimizer_steps": len(self.losses) - WARM_UP,
            "last_loss": round(self.losses[-1], 6),
            "largest_loss_difference": max(abs(a - b) for a, b in zip(self.losses, padded.losses)),
        }
