"""Packing of streams, whose lengths are not known in advance."""

from __future__ import annotations

import inspect
import sys
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from ..errors import PackingError
from .plans import as_lengths, check_budget, check_policy, cut, cut_out, plan


def token_count(example: Any) -> int:
    """Return the length of a mapping's ``input_ids``, or of any other example itself."""
    return len(example["input_ids"] if hasattr(example, "keys") else example)


class Stream(IterableDataset[list[Any]]):
    """An ``IterableDataset`` of packed rows; see :func:`stream`.

    Attributes:
        dropped: Number of examples that the current or last iteration has left out.
        truncated: Number of examples whose end it has left out.
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
        self._had_some = False

    def __iter__(self) -> Iterator[list[Any]]:
        self.dropped = self.truncated = 0
        waiting = _Waiting()
        for example, tokens in self._pieces():
            waiting.add(example, tokens)
            if len(waiting) > self.buffer:
                yield waiting.row(self.max_tokens)
        yield from waiting.rest(self.max_tokens)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the examples if they have ``set_epoch`` (a shuffling iterable dataset)."""
        if hasattr(self._examples, "set_epoch"):
            self._examples.set_epoch(epoch)

    def _arriving(self) -> Iterator[Any]:
        """The examples, which must be there in every epoch, and in one worker of a DataLoader only."""
        own = getattr(type(self._examples), "__iter__", None)
        # an __iter__ in Python may return the object itself and begin again; that of a generator, map or file does not
        if self._had_some and not inspect.isfunction(own) and iter(self._examples) is self._examples:
            raise PackingError(_READ_ONCE)
        worker, empty = get_worker_info(), True
        for example in self._examples if worker is None else _of_one_worker(self._examples, worker.num_workers):
            self._had_some, empty = True, False
            yield example
        if self._had_some and empty:
            raise PackingError(_READ_ONCE)

    def _pieces(self) -> Iterator[tuple[Any, int]]:
        for number, example in enumerate(self._arriving()):
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
            found = cut(as_lengths([length]), self.max_tokens, self._too_long)
            self.dropped += len(found.dropped)
            self.truncated += len(found.truncated)
            assert found.cuts is not None, "the example is longer than max_tokens"
            _, starts, stops = found.cuts
            for start, stop in zip(starts.tolist(), stops.tolist()):
                yield cut_out(example, start, stop, length), stop - start


_READ_ONCE = (
    "the examples of the stream have been iterated before, and they can be read only once, as a generator can: a "
    "second epoch would be empty, or begin where the first one ended. Pass an object that can be iterated again: a "
    "list, a dataset, or one with an __iter__ that makes a new generator."
)


def _of_one_worker(examples: Iterable[Any], workers: int) -> Iterator[Any]:
    """The examples in one of the workers of a DataLoader. Each worker has a copy of them.

    A worker knows which one it is by ``get_worker_info``, so examples that do not call it are the same in all workers.
    They call it where they begin, as those of ``datasets`` and ``webdataset`` do, so the first example shows it.

    Raises:
        PackingError: There are several workers, and the examples do not ask which one this is.
    """
    asked, before = [], sys.getprofile()

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is get_worker_info.__code__:
            asked.append(frame.f_code)

    sys.setprofile(profile)
    try:
        rest = iter(examples)
        first = list(islice(rest, 1))
    finally:
        sys.setprofile(before)
    if first and workers > 1 and not asked:
        raise PackingError(
            f"the stream is read by {workers} workers of a DataLoader, and its examples do not call "
            "torch.utils.data.get_worker_info: each worker would give all of them. Pass num_workers=1 or 0, or "
            "examples that give each worker a part of its own, as an IterableDataset of datasets with shards does."
        )
    yield from chain(first, rest)


class _Waiting:
    """Examples that are in no row yet, indexed by arrival and by length."""

    def __init__(self) -> None:
        self._by_arrival: dict[int, tuple[Any, int]] = {}
        self._by_length: list[tuple[int, int]] = []  # (tokens, -arrival): of equal lengths, the oldest example is last
        self._arrived = 0

    def __len__(self) -> int:
        return len(self._by_length)

    def add(self, example: Any, tokens: int) -> None:
        self._by_arrival[self._arrived] = example, tokens
        insort(self._by_length, (tokens, -self._arrived))
        self._arrived += 1

    def row(self, max_tokens: int) -> list[Any]:
        """Return a row of the oldest example and then, repeatedly, the longest one that fits."""
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
        """Yield the rows that ``plan`` makes of all waiting examples, ordered by their oldest example."""
        waiting = list(self._by_arrival.values())
        lengths = [tokens for _, tokens in waiting]
        for row in sorted(plan(lengths, max_tokens, seed=None), key=lambda row: int(row[0])):
            yield [waiting[index][0] for index in row.tolist()]


def stream(
    examples: Iterable[Any],
    max_tokens: int,
    buffer: int = 1000,
    *,
    too_long: str = "error",
    length: Callable[[Any], int] = token_count,
) -> Stream:
    """Pack the examples of an iterable dataset, while they arrive, into rows of at most ``max_tokens`` tokens.

    A row takes the example that has waited longest and then, repeatedly, the longest one that still fits. No example
    waits for more than ``buffer`` rows. At the end of the stream, the waiting examples are packed by best fit
    decreasing, so with a buffer as large as the stream the rows are those of :func:`fa2patch.packing.plan`. The same
    stream gives the same rows.

    The result is a torch ``IterableDataset`` of rows. Each row is a list of examples; collate rows one by one::

        rows = fa2patch.packing.stream(dataset, max_tokens=8192)
        loader = DataLoader(rows, batch_size=None, collate_fn=fa2patch.DataCollatorWithFlattening())

    :mod:`fa2patch.packing` describes how packing to a budget affects training. Ranks must iterate over different parts
    of the data (``datasets.distributed.split_dataset_by_node``). They may end after different numbers of rows, so set
    ``max_steps``. Several workers of a DataLoader are an error, unless the examples ask
    ``torch.utils.data.get_worker_info`` which part is theirs, as an ``IterableDataset`` of ``datasets`` does.

    Args:
        examples: Mappings with ``input_ids``, or sequences of tokens. Every iteration iterates over them again, so a
            generator serves for one epoch only.
        max_tokens: Maximum number of tokens in a row.
        buffer: Maximum number of waiting examples. A larger buffer fills rows better: with 1000 and 20 examples per
            row, rows are within 1 % of full.
        too_long: See :func:`fa2patch.packing.plan`. ``Stream.dropped`` and ``Stream.truncated`` count such examples.
        length: Function that returns the number of tokens of an example.

    Raises:
        PackingError: An option is invalid. While iterating: an example has no tokens, or is longer than ``max_tokens``
            and ``too_long="error"``; several workers would read the same examples; or the examples can be read only
            once, and this is not the first time.
    """
    return Stream(examples, max_tokens, buffer, too_long=too_long, length=length)
