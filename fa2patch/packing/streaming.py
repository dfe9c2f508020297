"""Packing of streams, whose lengths are not known in advance."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch.utils.data import IterableDataset

from ..errors import PackingError
from .budget import as_lengths, check_budget, check_policy, cut, cut_out, token_count
from .ranks import is_distributed
from .strategies import Waiting
from .stream_reader import START, Place, Reader, Source, StreamPart, check_ranks, this_part, this_rank


class Stream(IterableDataset[list[Any]]):
    """An ``IterableDataset`` of packed rows; see :func:`stream`.

    The counts are those of the current or last iteration of this process. Workers of a DataLoader have their own.

    Attributes:
        dropped: Number of examples that it has left out because they are too long.
        truncated: Number of examples whose end it has left out.
        empty: Number of examples that it has left out because they have no tokens.
        rows: Number of rows that it has given.
        tokens: Number of tokens in these rows.
    """

    def __init__(
        self,
        examples: Iterable[Any],
        max_tokens: int,
        buffer: int = 1000,
        *,
        too_long: str = "error",
        length: Callable[[Any], int] = token_count,
        ranks: str | tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        check_policy(too_long)
        check_ranks(ranks)
        if buffer < 1:
            raise PackingError(f"buffer: expected at least one example, found {buffer}.")
        self.max_tokens, self.buffer = check_budget(max_tokens), buffer
        self._source, self._too_long, self._length, self._ranks = Source(examples), too_long, length, ranks
        self._rank: tuple[int, int] | None = None  # in a worker that cannot know it
        self._count({})
        # workers that live for several epochs see the number that the main process sets, as those of datasets do
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._iteration: _Iteration | None = None
        self._loaded: tuple[Mapping[str, Any], int] | None = None  # a state, and the process that has loaded it

    def __iter__(self) -> Iterator[list[Any]]:
        # The IterableDatasetShard of accelerate, and of Transformers, iterates over all rows in each rank and takes
        # some. It is the caller, and is known by what it holds.
        caller = sys._getframe(1).f_locals.get("self")
        dealt = getattr(caller, "dataset", None) is self and getattr(caller, "num_processes", 1) > 1
        part = this_part(self._source.examples, self._ranks, self._rank or this_rank(), dealt)
        state, self._loaded = self._next_state(), None
        self._iteration = _Iteration(self, part, state)
        return self._iteration.rows()

    def __getstate__(self) -> dict[str, Any]:
        # A worker that is started anew has no process group, and may not know its rank.
        return {**self.__dict__, "_iteration": None, "_rank": this_rank() if is_distributed() else self._rank}

    @property
    def fill(self) -> float:
        """Fraction of the budget of the rows given so far that is filled with tokens; 1.0 if there are none."""
        return self.tokens / (self.rows * self.max_tokens) if self.rows else 1.0

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the examples if they have ``set_epoch`` (a shuffling iterable dataset)."""
        self._epoch.fill_(epoch)
        if hasattr(self._source.examples, "set_epoch"):
            self._source.examples.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the last row that the current or last iteration has given.

        The waiting examples are not in it. It says which they are, at most ``buffer`` numbers, and they are read again:
        from a position of the examples' own shortly before the oldest one, if they have ``state_dict`` and
        ``load_state_dict``, else from their beginning, without measuring or packing what has been given. The state is
        made of numbers, strings, lists, tuples and dicts, and of what the examples' own state is made of.

        Raises:
            PackingError: No iteration has begun in this process, so it does not know the position.
        """
        state = self._next_state()
        if state is not None:
            return dict(state)
        if self._iteration is None:
            raise PackingError(
                "state_dict: the stream has not been iterated in this process. With workers of a DataLoader, the "
                "position is known to the workers only: use torchdata.stateful_dataloader.StatefulDataLoader and its "
                "state_dict. Without workers, begin an iteration first."
            )
        return self._iteration.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the next iteration at the state, unless another epoch is set before it.

        Its rows are those that an uninterrupted iteration would have given after the state.

        Raises:
            PackingError: The state is of a stream with other options. While iterating: it is that of another rank or
                worker, of another number of them, or of other examples.
        """
        if state["options"] != self._options:
            raise PackingError(
                f"the state is of a stream with {state['options']}, and this one has {self._options}: its rows are "
                "others. Make the stream with the same options, or start a new epoch."
            )
        self.set_epoch(int(state["epoch"]))
        self._loaded = state, os.getpid()

    @property
    def _options(self) -> dict[str, Any]:
        return {"max_tokens": self.max_tokens, "buffer": self.buffer, "too_long": self._too_long}

    def _next_state(self) -> Mapping[str, Any] | None:
        if self._loaded is None or self._loaded[0]["epoch"] != int(self._epoch):
            return None
        if self._loaded[1] != os.getpid():  # the main process would keep it, and begin each epoch there
            raise PackingError(
                "a state was loaded in the main process, and the stream is iterated by a worker of a DataLoader. Use "
                "torchdata.stateful_dataloader.StatefulDataLoader and its load_state_dict, which loads it in the "
                "workers, or num_workers=0."
            )
        return self._loaded[0]

    def _count(self, counts: Mapping[str, int]) -> None:
        self.dropped, self.truncated, self.empty, self.rows, self.tokens = (counts.get(one, 0) for one in _COUNTS)


_COUNTS = ("dropped", "truncated", "empty", "rows", "tokens")


class _Iteration:
    """One iteration of a stream: what has been read, and what waits."""

    def __init__(self, stream: Stream, part: StreamPart, state: Mapping[str, Any] | None) -> None:
        self._stream, self._part, self._loaded = stream, part, state
        self._ended: int | None = None  # at the end of the stream: how many of the rows of what waited were given
        self._read_from(START)
        stream._count({} if state is None else state["counts"])

    def rows(self) -> Iterator[list[Any]]:
        if self._loaded is not None:
            self._resume(self._loaded)
            self._loaded = None
        waiting, buffer = self._waiting, self._stream.buffer
        for number, example in chain([(-1, None)], self._arriving):  # a state may have been saved among full rows
            for start, stop, piece in self._pieces(number, example) if number >= 0 else ():
                waiting.add((number, start), piece, stop - start)
            while len(waiting) > buffer:
                yield self._given(*waiting.row(self._stream.max_tokens))
                self._reader.place(waiting.oldest)  # which forgets earlier places: memory does not grow
        rows, given = self._waiting.rest(self._stream.max_tokens), self._ended or 0
        self._ended = given
        for row, tokens in rows[given:]:
            self._ended += 1
            yield self._given(row, tokens)

    def state(self) -> dict[str, Any]:
        if self._loaded is not None:
            return dict(self._loaded)
        stream, reader = self._stream, self._reader
        return {
            "options": stream._options,
            "epoch": int(stream._epoch),
            "part": self._part.number,
            "read": reader.read,
            "mark": reader.mark,
            "waiting": self._waiting.keys(),
            "ended": self._ended,
            "counts": {name: getattr(stream, name) for name in _COUNTS},
            "again": reader.place(self._waiting.oldest)._asdict(),
        }

    def _read_from(self, place: Place) -> None:
        every = max(self._stream.buffer, 100)  # a state of the examples may be long, and takes time to make
        self._reader = Reader(self._stream._source, self._part, every, place)
        self._arriving = iter(self._reader)
        self._waiting = Waiting()

    def _resume(self, state: Mapping[str, Any]) -> None:
        if list(state["part"]) != self._part.number:
            (was, of), (now, count) = state["part"], self._part.number
            raise PackingError(
                f"the state is that of process {was} of {of} that read the stream (ranks times workers), and this is "
                f"process {now} of {count}, which has other examples. Save the state of each rank, load each in its "
                "rank, and keep the number of ranks and workers, or start a new epoch."
            )
        again = Place(**state["again"])
        # a state of the examples may not lead to the same ones, as with a shuffle buffer of datasets; reading all does
        for place in (again, START) if again.state is not None else (START,):
            self._read_from(place)
            if self._reads_again(state):
                break
        else:
            raise PackingError(
                f"the examples are not those that the state belongs to: of the {state['read']} that were read before "
                "it, some are missing or others. Pass the same examples in the same order (the same files, seed and "
                "epoch), or start a new epoch."
            )
        self._ended = state["ended"]
        self._stream._count(state["counts"])  # what is read again has been counted

    def _reads_again(self, state: Mapping[str, Any]) -> bool:
        """Read up to the state, and return whether the examples are the same."""
        wanted = {(number, start) for number, start in state["waiting"]}
        numbers = {number for number, _ in wanted}
        while self._reader.read < state["read"]:
            number, example = next(self._arriving, (None, None))
            if number is None:
                return False
            for start, stop, piece in self._pieces(number, example) if number in numbers else ():
                if (number, start) in wanted:
                    self._waiting.add((number, start), piece, stop - start)
        same = (self._reader.read, self._reader.mark) == (state["read"], state["mark"])
        if state["ended"] is not None and next(self._arriving, None) is not None:
            return False  # the examples had ended there
        return same and len(self._waiting) == len(wanted)

    def _given(self, row: list[Any], tokens: int) -> list[Any]:
        self._stream.rows += 1
        self._stream.tokens += tokens
        return row

    def _pieces(self, number: int, example: Any) -> list[tuple[int, int, Any]]:
        # Start, stop and the piece, for each piece that is packed. What is left out is counted.
        stream = self._stream
        length = int(stream._length(example))
        if 1 <= length <= stream.max_tokens:
            return [(0, length, example)]
        if length < 1:
            stream.empty += 1
            return []
        found = cut(as_lengths([length]), stream.max_tokens, stream._too_long, first=number)
        stream.dropped += len(found.dropped)
        stream.truncated += len(found.truncated)
        assert found.cuts is not None, "the example is longer than max_tokens"
        spans = zip(found.cuts[1].tolist(), found.cuts[2].tolist())
        return [(start, stop, cut_out(example, start, stop, length)) for start, stop in spans]


def stream(
    examples: Iterable[Any],
    max_tokens: int,
    buffer: int = 1000,
    *,
    too_long: str = "error",
    length: Callable[[Any], int] = token_count,
    ranks: str | tuple[int, int] | None = None,
) -> Stream:
    """Pack the examples of an iterable dataset, while they arrive, into rows of at most ``max_tokens`` tokens.

    A row takes the example that has waited longest and then, repeatedly, the longest one that still fits. No example
    waits for more than ``buffer`` rows. At the end of the stream, the waiting examples are packed by best fit
    decreasing, so with a buffer as large as the stream the rows are those of :func:`fa2patch.packing.plan`. The same
    stream gives the same rows. Examples without tokens are left out; ``Stream.empty`` counts them.

    The result is a torch ``IterableDataset`` of rows. Each row is a list of examples; collate rows one by one::

        rows = fa2patch.packing.stream(dataset, max_tokens=8192)
        loader = DataLoader(rows, batch_size=None, collate_fn=fa2patch.DataCollatorWithFlattening())

    or give it to Trainer, with ``per_device_train_batch_size=1`` and ``max_steps``::

        Trainer(model, args, train_dataset=rows, data_collator=fa2patch.DataCollatorWithFlattening())

    Workers of a DataLoader share the examples out: each takes every n-th one, and reads all. That is right where
    reading is cheap. Examples that call ``torch.utils.data.get_worker_info``, as those of ``datasets`` and
    ``webdataset`` do, split themselves, and are not split again. Ranks are told what to do by ``ranks``. They may end
    after different numbers of rows, so set ``max_steps``.

    ``Stream.state_dict`` and ``load_state_dict`` resume behind any row. :mod:`fa2patch.packing` says how packing to
    a budget affects training.

    Args:
        examples: Mappings with ``input_ids``, or sequences of tokens. Every iteration iterates over them again, so a
            generator serves for one epoch only.
        max_tokens: Maximum number of tokens in a row.
        buffer: Maximum number of waiting examples. A larger buffer fills rows better: with 1000 and 20 examples per
            row, rows are within 1 % of full. ``Stream.fill`` says how full they are.
        too_long: See :func:`fa2patch.packing.plan`. ``Stream.dropped`` and ``Stream.truncated`` count such examples.
        length: Function that returns the number of tokens of an example.
        ranks: What several ranks (those of ``torch.distributed``, else of ``RANK`` and ``WORLD_SIZE``) do.

            - ``"split"``: The examples are the same in all ranks. Each rank takes every n-th of them, and reads all.
              Ranks that compute a row together are one, as for :class:`PackedBatchSampler`.
            - ``"all"``: Nothing: the examples are a part for each rank already.
            - (rank, ranks): As ``"split"``, for example with the local rank and the size of a dimension of a device
              mesh.
            - None: Nothing if ``datasets.distributed.split_dataset_by_node`` has split the examples, or if accelerate
              or Trainer give each rank some of the rows, as they do with ``dispatch_batches=False`` (otherwise they
              join the rows of all ranks, which have different lengths). Else it is an error if there are several
              ranks, because the examples do not show whether they are the same in all of them.

    Raises:
        PackingError: An option is invalid. While iterating: an example is longer than ``max_tokens`` and
            ``too_long="error"``; there are several ranks and ``ranks`` is None; the examples can be read only once, and
            this is not the first time, or there are several workers; or a state that was loaded does not belong to
            this stream.
    """
    return Stream(examples, max_tokens, buffer, too_long=too_long, length=length, ranks=ranks)
