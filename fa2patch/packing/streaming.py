"""Rows from examples whose lengths are not known beforehand."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import IterableDataset

from . import cutting
from .cutting import as_lengths, check_budget, check_policy
from .errors import PackingError
from .plans import plan


def token_count(example: Any) -> int:
    """Of a mapping its ``input_ids``' length, of anything else its own."""
    return len(example["input_ids"] if hasattr(example, "keys") else example)


class Stream(IterableDataset[list[Any]]):
    """Rows of an iterable's examples; see :func:`stream`.

    Attributes:
        dropped: how many examples the last iteration left out so far.
        truncated: likewise, of how many it left the end out.
    """

    def __init__(
        self,
        examples: Iterable[Any],
        max_tokens: int,
        buffer: int = 1000,
        *,
        too_long: str = "error",
        length: Callable[[Any], int] = token_count,
    ) -> None:
        super().__init__()
        check_policy(too_long)
        if buffer < 1:
            raise PackingError(f"buffer: expected at least one example, found {buffer}.")
        self.max_tokens, self.buffer = check_budget(max_tokens), buffer
        self._examples, self._too_long, self._length = examples, too_long, length
        self.dropped = self.truncated = 0

    def __iter__(self) -> Iterator[list[Any]]:
        self.dropped = self.truncated = 0
        waiting = _Waiting()
        for example, tokens in self._pieces():
            waiting.add(example, tokens)
            if len(waiting) > self.buffer:
                yield waiting.row(self.max_tokens)
        yield from waiting.rest(self.max_tokens)

    def set_epoch(self, epoch: int) -> None:
        """Told to the examples, where they want to know (a shuffling iterable dataset)."""
        if hasattr(self._examples, "set_epoch"):
            self._examples.set_epoch(epoch)

    def _pieces(self) -> Iterator[tuple[Any, int]]:
        for number, example in enumerate(self._examples):
            length = int(self._length(example))
            if length < 1:
                raise PackingError(f"example {number} of the stream has no tokens. Filter empty examples out.")
            if length <= self.max_tokens:
                yield example, length
                continue
            if self._too_long == "error":
                raise PackingError(
                    f"example {number} of the stream has {length} tokens, but max_tokens is {self.max_tokens}. Raise "
                    "it, or choose too_long='split', 'truncate' or 'drop'."
                )
            found = cutting.cut(as_lengths([length]), self.max_tokens, self._too_long)
            self.dropped += len(found.dropped)
            self.truncated += len(found.truncated)
            assert found.start is not None and found.stop is not None
            for start, stop in zip(found.start.tolist(), found.stop.tolist()):
                yield cutting.part(example, start, stop, length), stop - start


class _Waiting:
    """Examples that are in no row yet: by arrival, and by length."""

    def __init__(self) -> None:
        self._by_arrival: dict[int, tuple[Any, int]] = {}
        self._by_length: list[tuple[int, int]] = []  # (tokens, -arrival): of equals the one that waits longest is last
        self._arrived = 0

    def __len__(self) -> int:
        return len(self._by_length)

    def add(self, example: Any, tokens: int) -> None:
        self._by_arrival[self._arrived] = example, tokens
        insort(self._by_length, (tokens, -self._arrived))
        self._arrived += 1

    def row(self, max_tokens: int) -> list[Any]:
        """With the example that waits longest, then the longest that fits, as long as one does."""
        oldest = next(iter(self._by_arrival))
        found, space = [], max_tokens
        place = self._by_length.index((self._by_arrival[oldest][1], -oldest))
        while place >= 0:
            tokens, arrival = self._by_length.pop(place)
            found.append(self._by_arrival.pop(-arrival)[0])
            space -= tokens
            place = bisect_right(self._by_length, (space, 1)) - 1
        return found

    def rest(self, max_tokens: int) -> Iterator[list[Any]]:
        """All that wait, as ``plan`` packs them, those first that arrived first."""
        examples, lengths = [], []
        for example, tokens in self._by_arrival.values():
            examples.append(example)
            lengths.append(tokens)
        for row in sorted(plan(lengths, max_tokens, seed=None), key=lambda row: int(row[0])):
            yield [examples[index] for index in row.tolist()]


def stream(
    examples: Iterable[Any],
    max_tokens: int,
    buffer: int = 1000,
    *,
    too_long: str = "error",
    length: Callable[[Any], int] = token_count,
) -> Stream:
    """Rows of at most ``max_tokens`` tokens, packed while examples come: for iterable datasets.

    A row takes the example that waits longest, then again and again the longest that still fits. No example waits for
    more than ``buffer`` rows. What waits at the end is packed by best fit decreasing, so that with a buffer as
    large as the stream the rows are those of :func:`fa2patch.packing.plan`. The same stream gives the same rows.

    It is a torch ``IterableDataset`` of rows, each a list of examples; collate them one by one::

        rows = fa2patch.packing.stream(dataset, max_tokens=8192)
        loader = DataLoader(rows, batch_size=None, collate_fn=fa2patch.DataCollatorWithFlattening())

    What packing to a budget does to training: see :func:`fa2patch.packing.plan`. Ranks and workers must
    iterate over parts of the data (``datasets.distributed.split_dataset_by_node``), and ranks may end after differing
    numbers of rows: set ``max_steps``.

    Args:
        examples: mappings with ``input_ids``, or sequences of tokens; iterated over anew by every iteration.
        max_tokens: the most that a row may hold.
        buffer: how many examples may wait. More fill rows better: 1000 are within 1 % of full at 20 examples a row.
        too_long: as of ``plan``; ``Stream.dropped`` and ``.truncated`` count.
        length: tokens of an example.

    Raises:
        PackingError: at once for options; while iterating for an example without tokens, or over the budget and
            ``too_long="error"``.
    """
    return Stream(examples, max_tokens, buffer, too_long=too_long, length=length)
