"""What the scripts about split models and split rows share: batches whose documents are known, and findings.

A finding's table has a cell for each feature: ``found`` is ``right``, ``refused``, ``upstream`` (an error that the
unpatched model raises too) or, without fa2patch, ``right``, ``leaks`` or ``error``. ``off_by`` is the largest distance
from the documents alone, relative to the largest value, or None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Callable

import torch
from ranks import of_every_rank

import fa2patch
from compat_matrix.tiny_configs import VOCABULARY

Cell = dict[str, Any]
IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """A packed batch of known documents."""

    call: dict[str, Any]  # the forward's arguments, without labels
    labels: torch.Tensor  # [rows, length]
    documents: list[torch.Tensor]  # the token ids of each document
    places: list[torch.Tensor]  # where each document's tokens are in the flattened batch
    counted: list[int]  # how many of its last tokens have a loss, for each document

    def own(self, at: int) -> torch.Tensor:
        # Where the tokens of a document are that no other document has.
        others = torch.cat([places for other, places in enumerate(self.places) if other != at])
        return self.places[at][~torch.isin(self.places[at], others)]


def apart_from(value: Any, right: Any) -> float:
    return abs(float(value) / float(right) - 1)


def tokens(lengths: Sequence[int], seed: int = 0) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=drawn) for length in lengths]


def packed(*rows: Sequence[int], lengths: bool = False, crossing: bool = False) -> Batch:
    # Rows are padded to the longest one, which the mask says only if there is padding.
    # ``lengths``: the batch has the collator's lengths besides ``position_ids``. ``crossing``: the first token of each
    # document has a label too, which no document alone has.
    width = max(map(sum, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    positions, mask, labels = ids.clone(), ids.clone(), ids.clone().fill_(IGNORED)
    documents, places = [], []
    for number, row in enumerate(rows):
        start = 0
        for document in tokens(row, seed=number):
            here = slice(start, start + len(document))
            ids[number, here] = labels[number, here] = document
            positions[number, here] = torch.arange(len(document))
            mask[number, here] = 1
            if not crossing:
                labels[number, start] = IGNORED
            documents.append(document)
            places.append(number * width + torch.arange(start, start + len(document)))
            start += len(document)
    call: dict[str, Any] = {"input_ids": ids, "position_ids": positions}
    if not mask.all():
        call["attention_mask"] = mask
    if lengths:
        each = [len(document) for document in documents]
        cu = torch.tensor([0, *each]).cumsum(0).to(torch.int32)
        call.update(cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=max(each), max_length_k=max(each))
    return Batch(call, labels, documents, places, [len(document) - 1 for document in documents])


def shared(prompt: int, completions: Sequence[int]) -> Batch:
    # The row holds the prompt once, and several completions that continue it.
    first, *rest = tokens([prompt, *completions])
    documents = [torch.cat([first, completion]) for completion in rest]
    row = fa2patch.packing.share(documents, prompts=[prompt] * len(rest), least=1)
    return Batch(dict(row.batch), row.labels, documents, list(row.indices), list(completions))


@dataclass(frozen=True)
class Case:
    family: str = "llama"
    batch: Callable[[], Batch] = lambda: packed((5, 12, 1, 10))
    changes: dict[str, Any] = field(default_factory=lambda: dict(FOUR))
    checkpointing: bool = False


# Two and four processes can divide four heads of keys, as of queries.
FOUR = {"num_key_value_heads": 4}


def features() -> dict[str, Case]:
    # Every row's length can be divided by four, and every number of heads but one.
    return {
        "packed rows by ids": Case(),
        "packed rows by lengths": Case(batch=lambda: packed((5, 12, 1, 10), lengths=True)),
        "documents that cross the border": Case(batch=lambda: packed((25, 3))),
        "several rows": Case(batch=lambda: packed((5, 12, 1, 10), (20, 8))),
        "windows": Case("mistral", changes={**FOUR, "sliding_window": 4}),
        "sinks": Case("gpt_oss"),
        "softcap": Case("gemma2"),
        "fewer key heads than processes": Case(changes={"num_key_value_heads": 1}),
        "checkpointing": Case(checkpointing=True),
        "shared prompts": Case(batch=lambda: shared(9, (5, 1, 7))),
        "mixers": Case("qwen3_next"),
        "padding": Case(batch=lambda: packed((5, 12, 1, 2), (20, 8))),
        "labels": Case(batch=lambda: packed((5, 12, 1, 10), crossing=True)),
    }


def alone(model: Any, batch: Batch) -> tuple[list[torch.Tensor], torch.Tensor]:
    # Returns each document's logits, [length, vocabulary], and the mean loss of all counted tokens.
    logits, losses = [], []
    for document, counted in zip(batch.documents, batch.counted):
        found = model(input_ids=document[None], use_cache=False).logits[0]
        losses.append(torch.nn.functional.cross_entropy(found[:-1], document[1:], reduction="none")[-counted:])
        logits.append(found)
    return logits, torch.cat(losses).mean()


def furthest(logits: torch.Tensor, batch: Batch, right: Sequence[torch.Tensor]) -> float:
    # The distance is relative to the largest logit of documents alone.
    flat = logits.flatten(0, 1)
    return between([flat[places] for places in batch.places], right)


def between(found: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> float:
    scale = max(float(one.detach().abs().max()) for one in right)
    return max(float((one - other).detach().abs().max()) for one, other in zip(found, right)) / scale


def cell(found: str, said: str = "", off_by: float | None = None) -> Cell:
    return {"found": found, "said": said, "off_by": off_by}


def told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def judged(off_by: float, bound: float, said: str = "") -> Cell:
    return cell("right" if off_by < bound else "leaks", said, off_by)


def joined(found: Cell) -> Cell:
    order = ("right", "upstream", "refused", "error", "leaks", "wrong")
    every = of_every_rank(found)
    worst: Cell = max(every, key=lambda one: (order.index(one["found"]), one["off_by"] or 0.0))
    return worst
