"""The collators that are compared: padded, packed in one row, packed in two."""

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
    """Return the token ids and labels of each example, with the first label ignored, because nothing predicts it.

    Without this, Trainer 4.46 to 4.57 counts it among the tokens by which a padded batch's loss is divided.
    """
    kept = [{"input_ids": [*one["input_ids"]], "labels": [*one.get("labels", one["input_ids"])]} for one in features]
    for one in kept:
        one["labels"][0] = IGNORED
    return kept


def padded(features: Features) -> Batch:
    """Collate one row for each example, padded to the longest."""
    rows = tokens(features)
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    labels = [torch.tensor(row["labels"]) for row in rows]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
    }


def packed(features: Features, **options: Any) -> Batch:
    """Collate all examples into one row with fa2patch's collator."""
    return fa2patch.DataCollatorWithFlattening(**options)(tokens(features))


def packed_in_two_rows(features: Features) -> Batch:
    """Collate half of the examples into each of two rows; the ``attention_mask`` is zero on the shorter one's
    padding.
    """
    rows = [packed(half) for half in (features[::2], features[1::2]) if half]
    rows = [{**row, "attention_mask": torch.ones_like(row["input_ids"])} for row in rows]
    padding = {"input_ids": 0, "position_ids": 0, "attention_mask": 0, "labels": IGNORED}
    joined = {name: [row[name][0] for row in rows] for name in padding}
    return {name: pad_sequence(joined[name], batch_first=True, padding_value=fill) for name, fill in padding.items()}


class Noted:
    """A collator that records the examples it was given.

    Attributes:
        seen: a checksum of each batch's token ids.
        last: the last batch.
    """

    def __init__(self, collate: Callable[[Features], Batch]) -> None:
        self.collate = collate
        self.seen: list[int] = []
        self.last: Batch = {}

    def __call__(self, features: Features) -> Batch:
        self.seen.append(zlib.crc32(repr([list(one["input_ids"]) for one in features]).encode()))
        self.last = self.collate(features)
        return self.last
