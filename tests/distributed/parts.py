"""What the scripts about split models and split rows share: batches whose documents are known, and findings.

A finding's table holds a cell for each feature: ``{"found": ..., "said": ..., "off_by": ...}``. ``found`` is ``right``,
``refused``, ``upstream`` (an error that the unpatched model raises too) or, without fa2patch, ``right``, ``leaks`` or
``error``. ``off_by`` is the largest distance from the documents alone, relative to the largest value, or None.
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
    """A packed batch of known documents.

    Attributes:
        call: the forward's arguments, without labels.
        labels: int64 ``[rows, length]``.
        documents: the token ids of each document, int64 ``[length]``.
        places: for each document where its tokens are in the flattened batch, int64 ``[length]``.
        counted: for each document how many of its last tokens have a loss.
    """

    call: dict[str, Any]
    labels: torch.Tensor
    documents: list[torch.Tensor]
    places: list[torch.Tensor]
    counted: list[int]

    def own(self, at: int) -> torch.Tensor:
        """Where the tokens of a document are that no other document has."""
        others = torch.cat([places for other, places in enumerate(self.places) if other != at])
        return self.places[at][~torch.isin(self.places[at], others)]


def apart_from(value: Any, right: Any) -> float:
    """Return how far a number is from another one, relative to it."""
    return abs(float(value) / float(right) - 1)


def tokens(lengths: Sequence[int], seed: int = 0) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=drawn) for length in lengths]


def packed(*rows: Sequence[int], lengths: bool = False, crossing: bool = False) -> Batch:
    """Make rows of documents of some lengths, padded to the longest row, which the mask says if there is padding.

    Args:
        rows: the lengths of each row's documents.
        lengths: whether the batch has the collator's lengths besides ``position_ids``.
        crossing: whether the first token of each document has a label, too, which no document alone has.
    """
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
    """Make a row that holds a prompt once, and several completions that continue it."""
    first, *rest = tokens([prompt, *completions])
    documents = [torch.cat([first, completion]) for completion in rest]
    row = fa2patch.packing.share(documents, prompts=[prompt] * len(rest), least=1)
    return Batch(dict(row.batch), row.labels, documents, list(row.indices), list(completions))


@dataclass(frozen=True)
class Case:
    """A tiny model and a batch for it. ``changes`` are of the model's config."""

    family: str = "llama"
    batch: Callable[[], Batch] = lambda: packed((5, 12, 1, 10))
    changes: dict[str, Any] = field(default_factory=lambda: dict(FOUR))
    checkpointing: bool = False


FOUR = {"num_key_value_heads": 4}
"""Four heads of keys, as of queries, so that two and four processes can divide them."""


def features() -> dict[str, Case]:
    """Return the cases by feature. Every row's length can be divided by four, and every number of heads but one."""
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
    """Return the logits of each document alone, ``[length, vocabulary]``, and the mean loss of all counted tokens."""
    logits, losses = [], []
    for document, counted in zip(batch.documents, batch.counted):
        found = model(input_ids=document[None], use_cache=False).logits[0]
        losses.append(torch.nn.functional.cross_entropy(found[:-1], document[1:], reduction="none")[-counted:])
        logits.append(found)
    return logits, torch.cat(losses).mean()


def furthest(logits: torch.Tensor, batch: Batch, right: Sequence[torch.Tensor]) -> float:
    """Return the largest distance of a batch's logits from those of documents alone, relative to the largest logit."""
    flat = logits.flatten(0, 1)
    return between([flat[places] for places in batch.places], right)


def between(found: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> float:
    """Return the largest distance of each document's logits from the right ones, relative to the largest logit."""
    scale = max(float(one.detach().abs().max()) for one in right)
    return max(float((one - other).detach().abs().max()) for one, other in zip(found, right)) / scale


def cell(found: str, said: str = "", off_by: float | None = None) -> Cell:
    return {"found": found, "said": said, "off_by": off_by}


def told(error: BaseException) -> str:
    """Return an error's class and its first line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def judged(off_by: float, bound: float, said: str = "") -> Cell:
    """Return the cell of an unpatched model that computed something."""
    return cell("right" if off_by < bound else "leaks", said, off_by)


def joined(found: Cell) -> Cell:
    """Return one cell for all processes: the worst of what they found."""
    order = ("right", "upstream", "refused", "error", "leaks", "wrong")
    every = of_every_rank(found)
    worst: Cell = max(every, key=lambda one: (order.index(one["found"]), one["off_by"] or 0.0))
    return worst
