"""The batching variants of arXiv 2407.09105: which documents share a mini-batch, and how it is laid out.

The first four are those of the paper's table 2. `sorted` and `multipack` are its optimized sample selection. The last
is a control that the paper does not have: it differs from `online mini-batch + ids` only in the leak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from train_once import Batch, Collator, Example, pad

import fa2patch
from fa2patch.packing import plan

MiniBatch = list[Example]


@dataclass(frozen=True)
class Sizes:
    """The sizes of mini-batches.

    Attributes:
        batch_size: documents of a padded mini-batch.
        row_length: tokens of a filled row.
        seed: the seed of the documents' order.
    """

    batch_size: int
    row_length: int
    seed: int


@dataclass(frozen=True)
class Variant:
    """One way of batching.

    Attributes:
        mini_batches: groups documents into mini-batches.
        collate: lays out one mini-batch.
        ids: whether position ids restart in every document and fa2patch is applied. Without it nothing isolates
            documents.
    """

    mini_batches: Callable[[list[Example], Sizes], list[MiniBatch]]
    collate: Collator
    ids: bool = False
    one_row: bool = False
    """Whether a mini-batch is one row of the data set, packed before training starts."""

    def rows(self, mini_batches: Sequence[MiniBatch]) -> int:
        """Return the number of rows of the data set as the paper counts them: documents, or rows packed beforehand."""
        return len(mini_batches) if self.one_row else sum(map(len, mini_batches))


def shuffled(documents: Sequence[Example], seed: int) -> list[Example]:
    """Return the documents in a random order."""
    return [documents[index] for index in np.random.default_rng(seed).permutation(len(documents))]


def chunks(documents: Sequence[Example], size: int) -> list[MiniBatch]:
    """Split documents into mini-batches of ``size``."""
    return [list(documents[start : start + size]) for start in range(0, len(documents), size)]


def lengths(documents: Iterable[Example]) -> np.ndarray:
    """Return the documents' lengths in tokens."""
    return np.array([len(document["input_ids"]) for document in documents])


def planned(documents: Sequence[Example], max_tokens: int, strategy: str, seed: int) -> list[MiniBatch]:
    """Group documents by ``fa2patch.packing.plan``."""
    bins = plan(lengths(documents), max_tokens, strategy=strategy, seed=seed)
    return [[documents[index] for index in members] for members in bins]


# --- which documents share a mini-batch ----------------------------------------------------------------------


def at_random(documents: list[Example], sizes: Sizes) -> list[MiniBatch]:
    """Group a fixed number of random documents, as a data loader does by default."""
    return chunks(shuffled(documents, sizes.seed), sizes.batch_size)


def cut_to_length(documents: list[Example], sizes: Sizes) -> list[MiniBatch]:
    """Join all documents and cut every ``row_length`` tokens, regardless of documents. The remainder is dropped."""
    order = shuffled(documents, sizes.seed)
    stream = {key: list(chain.from_iterable(document[key] for document in order)) for key in ("input_ids", "labels")}
    ends = range(sizes.row_length, len(stream["input_ids"]) + 1, sizes.row_length)
    rows = [{key: values[end - sizes.row_length : end] for key, values in stream.items()} for end in ends]
    return chunks(rows, sizes.batch_size)


def offline(documents: list[Example], sizes: Sizes) -> list[MiniBatch]:
    """Group whole documents in a random order, up to the tokens of ``batch_size`` filled rows."""
    return planned(shuffled(documents, sizes.seed), sizes.batch_size * sizes.row_length, "in_order", sizes.seed)


def budget(documents: Sequence[Example], sizes: Sizes) -> int:
    """Return the tokens of an average mini-batch, so that the number of optimizer steps stays about the same."""
    tokens = lengths(documents)
    return max(int(tokens.max()), round(sizes.batch_size * float(tokens.mean())))


def by_length(documents: list[Example], sizes: Sizes) -> list[MiniBatch]:
    """Group documents of similar length, up to the budget."""
    return planned(shuffled(documents, sizes.seed), budget(documents, sizes), "sorted", sizes.seed)


def multipack(documents: list[Example], sizes: Sizes) -> list[MiniBatch]:
    """Group documents whose total comes as close to the budget as possible."""
    order = shuffled(documents, sizes.seed)
    return planned(order, budget(documents, sizes), "best_fit_decreasing", sizes.seed)


# --- how a mini-batch is laid out ----------------------------------------------------------------------------


def rows_without_ids(rows: MiniBatch) -> Batch:
    """Lay out one row for each filled row. Position ids continue from its first token to its last."""
    return {key: torch.tensor([row[key] for row in rows]) for key in ("input_ids", "labels")}


def one_row_without_ids(documents: MiniBatch) -> Batch:
    """Flatten the mini-batch, with position ids that continue from one document into the next."""
    batch = fa2patch.DataCollatorWithFlattening(return_position_ids=False)(documents)
    return {key: batch[key] for key in ("input_ids", "labels")}


flatten = fa2patch.DataCollatorWithFlattening()

VARIANTS: dict[str, Variant] = {
    "padding": Variant(at_random, pad),
    "packing, no ids": Variant(cut_to_length, rows_without_ids),
    "offline packing + ids": Variant(offline, flatten, ids=True, one_row=True),
    "online mini-batch + ids": Variant(at_random, flatten, ids=True),
    "sorted + ids": Variant(by_length, flatten, ids=True, one_row=True),
    "multipack + ids": Variant(multipack, flatten, ids=True, one_row=True),
    "online mini-batch, no ids": Variant(at_random, one_row_without_ids),
}
