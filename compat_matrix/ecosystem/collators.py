"""The batches that are compared: padded, packed in one row, packed in two."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

import fa2patch

IGNORED = -100
Features = Sequence[Mapping[str, Any]]
Batch = dict[str, Any]


def tokens(features: Features) -> list[dict[str, list[int]]]:
    """Of each example what a causal LM is trained on; the first label is ignored, as nothing predicts it.

    Said outright because Trainer 4.46 to 4.57 counts it among the tokens that a padded batch's loss is divided by.
    """
    kept = [{"input_ids": [*one["input_ids"]], "labels": [*one.get("labels", one["input_ids"])]} for one in features]
    for one in kept:
        one["labels"][0] = IGNORED
    return kept


def padded(features: Features) -> Batch:
    """A row for each example, every row as long as the longest."""
    rows = tokens(features)
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    labels = [torch.tensor(row["labels"]) for row in rows]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
    }


def packed(features: Features, **options: Any) -> Batch:
    """All examples in one row, by fa2patch's collator."""
    return fa2patch.DataCollatorWithFlattening(**options)(tokens(features))


def packed_in_two_rows(features: Features) -> Batch:
    """Half of the examples in each of two rows, the shorter one padded, with the usual mask: ones, zeros on padding."""
    rows = [packed(half) for half in (features[::2], features[1::2]) if half]
    rows = [{**row, "attention_mask": torch.ones_like(row["input_ids"])} for row in rows]
    padding = {"input_ids": 0, "position_ids": 0, "attention_mask": 0, "labels": IGNORED}
    joined = {name: [row[name][0] for row in rows] for name in padding}
    return {name: pad_sequence(joined[name], batch_first=True, padding_value=fill) for name, fill in padding.items()}


class Noted:
    """A collator that notes which examples it was given, batch after batch."""

    def __init__(self, collate: Callable[[Features], Batch]) -> None:
        self.collate = collate
        self.seen: list[int] = []
        self.last: Batch = {}

    def __call__(self, features: Features) -> Batch:
        self.seen.append(zlib.crc32(repr([list(one["input_ids"]) for one in features]).encode()))
        self.last = self.collate(features)
        return self.last
