"""Which examples of a stream a process reads, and from where it reads them again after a resume."""

from __future__ import annotations

import copy
import inspect
import sys
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import get_worker_info

from ..errors import PackingError
from .ranks import ALL_RANKS, replicas_and_rank

SPLIT = "split"

_READ_ONCE = (
    "the examples of the stream have been iterated before, and they can be read only once, as a generator can: a "
    "second epoch would be empty, or begin where the first one ended. Pass an object that can be iterated again: a "
    "list, a dataset, or one with an __iter__ that makes a new generator."
)


class StreamPart(NamedTuple):
    """One of the processes that read a stream: the workers of a DataLoader, in each rank."""

    rank: int
    ranks: int
    worker: int = 0
    workers: int = 1

    @property
    def number(self) -> list[int]:
        # The number of this process, and how many there are. A DataLoader without workers is one with one.
        return [self.rank * self.workers + self.worker, self.ranks * self.workers]


def this_rank() -> tuple[int, int]:
    # Ranks are counted as PackedBatchSampler does.
    ranks, rank = replicas_and_rank(None, None, None)
    assert isinstance(rank, int), "it was not asked for by name"
    return rank, ranks


def this_part(
    examples: Any,
    ranks: Any,
    found: tuple[int, int],  # this rank and the number of ranks
    rows_are_dealt: bool,  # what iterates over the rows gives each rank some of them
) -> StreamPart:
    # The part's number of ranks is 1 if the examples are not to be shared out among ranks.
    worker = get_worker_info()
    whole = StreamPart(0, 1) if worker is None else StreamPart(0, 1, worker.id, worker.num_workers)
    # set by datasets.distributed.split_dataset_by_node, and kept by what is derived from its result (datasets 2.8 on)
    split = getattr(examples, "_distributed", None) is not None
    if rows_are_dealt and (split or ranks not in (None, ALL_RANKS)):
        raise PackingError(
            "accelerate (or Trainer) gives each rank some of the rows of this stream, and the stream has only those of "
            "its own rank: most of them would be lost. Leave ranks out and pass the same examples in all ranks."
        )
    if split and ranks not in (None, ALL_RANKS):
        raise PackingError(
            f"ranks={ranks!r}, but datasets.distributed.split_dataset_by_node has split the examples already: most of "
            "them would be lost. Leave ranks out."
        )
    if ranks is None and not split and not rows_are_dealt and found[1] > 1:
        raise PackingError(
            f"the stream is read by {found[1]} ranks, and cannot know whether each of them has other examples: a "
            "stream that is split twice loses examples, and one that is not split repeats them. Say it: ranks='split' "
            "if the examples are the same in all ranks, so that each rank takes its part, or ranks='all' if they are a "
            "part for each rank already (split_by_node of webdataset, shards of your own). What "
            "datasets.distributed.split_dataset_by_node has split is recognised. With Trainer or accelerate, which "
            "give each rank some of the rows, pass dispatch_batches=False instead (in Trainer "
            "accelerator_config={'dispatch_batches': False}), because rows have different lengths."
        )
    if ranks in (None, ALL_RANKS):
        return whole
    rank, count = found if ranks == SPLIT else ranks
    return whole._replace(rank=rank, ranks=count)


def check_ranks(ranks: Any) -> None:
    if isinstance(ranks, tuple) and len(ranks) == 2 and all(type(one) is int for one in ranks):
        replicas_and_rank(ranks[1], ranks[0], None)  # checks that the rank is one of them
    elif not (ranks is None or (isinstance(ranks, str) and ranks in (SPLIT, ALL_RANKS))):
        raise PackingError(f"ranks: expected 'split', 'all', None or a tuple (rank, ranks), found {ranks!r}.")


class Source:
    """The examples of a stream, which are iterated once an epoch."""

    def __init__(self, examples: Iterable[Any]) -> None:
        self.examples = examples
        self._had_some = False

    def begin(self, workers: int, state: Any) -> tuple[Any, Iterator[Any], bool]:
        """What an epoch iterates from a state on, its iterator, and whether each worker gets a part of its own."""
        # an __iter__ in Python may return the object itself and begin again; that of a generator, map or file does not
        own = getattr(type(self.examples), "__iter__", None)
        once = not inspect.isfunction(own) and iter(self.examples) is self.examples
        if once and self._had_some:
            raise PackingError(_READ_ONCE)
        examples: Any = self.examples
        if state is not None:
            if not has_state(examples):
                raise PackingError(
                    "the state holds a state of the examples, but these examples have no load_state_dict. Pass the "
                    "examples that the stream had when the state was saved."
                )
            # a copy, because datasets goes on at a loaded state in each later iteration too, until the next epoch
            examples = copy.copy(examples)
            examples.load_state_dict(state)
        first, rest, asked = _begun(examples, workers > 1)
        if once and workers > 1 and not asked:
            raise PackingError(
                f"the stream is read by {workers} workers of a DataLoader, and its examples can be read only once, as "
                "a generator can: workers are copies of one process, and a file that is open already would be read by "
                "all of them in turn. Pass num_workers=1 or 0, or examples with an __iter__ that makes a new generator."
            )
        if self._had_some and not first and state is None:
            raise PackingError(_READ_ONCE)
        self._had_some |= bool(first)
        return examples, chain(first, rest), asked


def has_state(examples: Any) -> bool:
    """Whether the examples can save and load their position, as an ``IterableDataset`` of datasets can."""
    save, load = getattr(examples, "state_dict", None), getattr(examples, "load_state_dict", None)
    if not callable(save) or not callable(load):
        return False
    # A state_dict that needs arguments (MosaicML's StreamingDataset) is of another kind.
    try:
        inspect.signature(save).bind()
        inspect.signature(load).bind({})
    except TypeError:
        return False
    return True


def _begun(examples: Iterable[Any], in_workers: bool) -> tuple[list[Any], Iterator[Any], bool]:
    """The first example (or none), the rest of them, and whether they call ``get_worker_info`` in a worker."""
    # Each worker has a copy of the examples, which know by this function alone which one it is. Examples that do not
    # call it are the same in all workers. Those of datasets and webdataset call it where they begin, so the first one
    # shows it.
    asked, before = [], sys.getprofile()

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is get_worker_info.__code__:
            asked.append(frame.f_code)

    if in_workers:  # elsewhere the user's profiler goes on
        sys.setprofile(profile)
    try:
        rest = iter(examples)
        return list(islice(rest, 1)), rest, bool(asked)
    finally:
        if in_workers:
            sys.setprofile(before)


class Place(NamedTuple):
    """A place from which examples can be read again."""

    number: int  # of the first example that is read
    mark: int  # checksum of the examples before it
    state: Any  # of the examples; None is their beginning


START = Place(0, 0, None)


class Reader:
    """Numbers the examples that this process reads, and gives those of its part."""

    def __init__(self, source: Source, part: StreamPart, every: int, begin: Place) -> None:
        self._source, self._part, self._every = source, part, every
        self._places = deque([begin])
        # The number of the last example that was given, plus 1, and a checksum of the last tokens of all of them. By it
        # a resume sees whether it has read the same ones. Examples that are not tokens do not change it.
        self.read, self.mark = begin.number, begin.mark

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        begin, (rank, ranks, worker, workers) = self._places[0], self._part
        examples, arriving, asked = self._source.begin(workers, begin.state)
        # Processes that have the same examples take every n-th of them, so each process reads all of them. That is
        # right where reading is cheap, and elsewhere the examples should split themselves.
        index, parts = (rank, ranks) if asked else (rank * workers + worker, ranks * workers)
        saves = has_state(examples)
        for number, example in enumerate(arriving, begin.number):
            if number % parts == index:
                self.read, self.mark = number + 1, _marked(example, self.mark)
                yield number, example
            if saves and (number + 1) % self._every == 0:
                self._places.append(Place(number + 1, self.mark, examples.state_dict()))

    def place(self, oldest: int) -> Place:
        """Where to read again to get ``oldest`` and all later examples. Earlier places are forgotten."""
        # At least ``every`` examples are read again (if there are as many), so that the checksum compares some.
        # Examples may be others after a resume: datasets loses those of its shuffle buffers.
        needed = min(oldest, self.read - self._every)
        while len(self._places) > 1 and self._places[1].number <= needed:
            self._places.popleft()
        return self._places[0]


def _marked(example: Any, mark: int) -> int:
    try:
        last = np.asarray((example["input_ids"] if hasattr(example, "keys") else example)[-16:])
    except (IndexError, KeyError, TypeError, ValueError):  # examples of another kind
        return mark
    return zlib.crc32(last.tobytes(), mark) if last.dtype.kind in "iu" else mark
