"""A batch sampler for DataLoader: a packed row of examples per step and rank."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler

from . import costs, epochs
from .cutting import as_lengths
from .epochs import Epoch
from .errors import PackingError
from .plans import plan
from .strategies import Ints

ALL_RANKS = "all"


class PackedBatchSampler(Sampler[list[int]]):
    """Lists of example indices for ``DataLoader(batch_sampler=...)``: each is one packed row, one per step and rank.

    Rows that cost about as much share a step, since a step takes as long as its costliest rank::

        sampler = fa2patch.packing.PackedBatchSampler(lengths, max_tokens=8192)
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=fa2patch.DataCollatorWithFlattening())
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for batch in loader: ...

    Ranks need not speak to each other: each makes the same plan and takes its own rows. All have the same number of
    steps, and in an epoch every example is in exactly one row of one rank, but for what ``dropped``, ``repeated``
    and ``left_out`` name.

    **accelerate and Trainer** deal batches to processes themselves, one after the other. Give them those of all
    ranks, in that order: ``PackedBatchSampler(..., rank="all")``, ``Trainer.get_train_dataloader`` returning
    ``self.accelerator.prepare(DataLoader(dataset, batch_sampler=sampler, ...))``. With several processes most versions
    want ``even_batches=False`` (Trainer: ``accelerator_config={"even_batches": False}``), and say so; and those before
    1.8 (seen in 0.25 to 1.1) do not tell the sampler the epoch: call its ``set_epoch`` in a callback's
    ``on_epoch_begin``.

    **What it does to training.** A budget of tokens packs more examples into a step, so that there are fewer optimizer
    steps: see :func:`fa2patch.packing.plan`. ``strategy="mini_batches"`` with ``max_tokens=None`` and
    ``batch_size=n`` keeps both their number and what is in each: every n x ranks examples of a random order are a
    step, only dealt out by cost instead of by number. Ranks hold differing numbers of tokens (and of examples), so
    a loss must be normalised over all ranks' labels, not averaged over ranks: in Trainer by
    ``average_tokens_across_devices=True``.
    With any budget, the rows of a step are alike: many short documents, or a few long ones, on all ranks at once.

    Args:
        lengths: tokens of each example, ``[examples]``.
        max_tokens: the most that a row may hold; None for ``mini_batches``, and only there.
        num_replicas: ranks. Default: of torch.distributed where it is initialised, else ``WORLD_SIZE`` as torchrun sets
            it, else 1.
        rank: this one, by default likewise; or ``"all"``.
        seed: with the epoch, of everything that is drawn.
        strategy: of :func:`fa2patch.packing.plan`. ``in_order`` keeps the order of examples over steps and ranks, in
            every epoch: rows are then not balanced.
        too_long: ``"error"`` or ``"drop"``. (An index cannot say that an example is to be cut: cut the dataset.)
        batch_size: examples per rank and step on average, for ``mini_batches``.
        attention_cost: what attention over a document of l tokens costs, by l squared, in what a token costs otherwise.
            1 / (12 x hidden size) is a good guess; 0 balances tokens.
        window: steps among which rows change places for balance; fewer mix more, more balance better.
        drop_last: leave the last, incomplete step out. Otherwise its rows are divided until every rank has one; only
            where no row can be divided any more are some repeated.

    Attributes:
        dropped: examples longer than the budget, in no epoch (``too_long="drop"``).
        repeated, left_out: examples that come twice, or not at all, in this epoch's last step.
        epoch: as set last.

    Raises:
        PackingError: what ``plan`` raises; a rank that is none.
    """

    batch_size = None  # for accelerate: batches differ in their number of examples
    drop_last = False  # likewise: no batch of what we give is to be left out

    def __init__(
        self,
        lengths: Sequence[int] | npt.NDArray[Any],
        max_tokens: int | None,
        num_replicas: int | None = None,
        rank: int | str | None = None,
        *,
        seed: int = 0,
        strategy: str = "best_fit_decreasing",
        too_long: str = "error",
        batch_size: int | None = None,
        attention_cost: float = costs.ATTENTION_COST,
        window: int = 64,
        drop_last: bool = False,
    ) -> None:
        self.lengths = as_lengths(lengths)
        self.num_replicas, self.rank = _place(num_replicas, rank)
        if too_long not in ("error", "drop"):
            raise PackingError(
                f"too_long: expected 'error' or 'drop', found {too_long!r}. Cut the dataset before it is sampled."
            )
        if window < 1:
            raise PackingError(f"window: expected at least one step, found {window}.")
        self.epoch = 0
        self._asked: dict[str, Any] = {"max_tokens": max_tokens, "strategy": strategy, "too_long": too_long}
        self._attention_cost = costs.check_attention_cost(attention_cost)
        self._batch_size, self._seed, self._window, self._drop_last = batch_size, seed, window, drop_last
        self._resume = self._step = 0
        self.dropped = plan(self.lengths, batch_size=batch_size, seed=None, **self._asked).dropped
        self._made: tuple[int, Epoch] | None = None

    @property
    def sampler(self) -> PackedBatchSampler:
        """Itself: where accelerate looks for something to tell the epoch to."""
        return self

    @property
    def repeated(self) -> Ints:
        return self._rows.repeated

    @property
    def left_out(self) -> Ints:
        return self._rows.left_out

    def __len__(self) -> int:
        """Steps in an epoch, on every rank; of ``rank="all"``: rows."""
        rows = len(self._rows.offsets) - 1
        return rows if self.rank == ALL_RANKS else rows // self.num_replicas

    def __iter__(self) -> Iterator[list[int]]:
        rows, every = self._rows, 1 if self.rank == ALL_RANKS else self.num_replicas
        first = 0 if isinstance(self.rank, str) else self.rank
        self._step, self._resume = self._resume, 0
        for row in range(first + self._step * self.num_replicas, len(rows.offsets) - 1, every):
            self._step = row // self.num_replicas + 1
            yield rows.row(row)

    def set_epoch(self, epoch: int) -> None:
        """To be called before each epoch, or every epoch has the same order."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._resume = self._step = 0

    def costs(self) -> npt.NDArray[np.float64]:
        """Of this epoch's rows, ``[steps, ranks]``, in tokens."""
        rows = self._rows
        each = self._example_costs[rows.indices]
        found = np.add.reduceat(each, rows.offsets[:-1]) if len(each) else each
        return found.reshape(-1, self.num_replicas)

    def state_dict(self, steps: int | None = None) -> dict[str, int]:
        """Where this epoch is, to go on from there.

        Args:
            steps: trained on in this epoch. Default: those that this sampler has given; a DataLoader with workers
                is ahead of training by what it prefetches, and must be told.
        """
        given = self._step if steps is None else steps
        return {"epoch": self.epoch, "step": given, "fingerprint": self._fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration goes on there, unless another epoch is set before it.

        Raises:
            PackingError: the state is of other lengths or options, of which ``num_replicas`` is one.
        """
        if state["fingerprint"] != self._fingerprint:
            raise PackingError(
                "the state is of a sampler with other lengths, ranks, seed or options, whose steps hold others. "
                "Make the sampler as it was, or start an epoch anew."
            )
        self.epoch = int(state["epoch"])
        self._resume = self._step = int(state["step"])

    @property
    def _fingerprint(self) -> int:
        dealt = self._attention_cost, self._window, self._batch_size, self._drop_last, self.num_replicas
        options = sorted(self._asked.items()), dealt, self._seed
        return zlib.crc32(repr(options).encode(), zlib.crc32(self.lengths.tobytes()))

    @property
    def _example_costs(self) -> npt.NDArray[np.float64]:
        return costs.example_costs(self.lengths, self._attention_cost)

    @property
    def _rows(self) -> Epoch:
        if self._made is None or self._made[0] != self.epoch:
            self._made = self.epoch, self._plan()
        return self._made[1]

    def _plan(self) -> Epoch:
        """The same on every rank: of all of them."""
        each, seed = self._example_costs, (self._seed, self.epoch)
        if self._batch_size is not None:
            return epochs.mini_batches(each, self._batch_size, self.num_replicas, seed, self._drop_last)
        planned = plan(self.lengths, seed=seed, **self._asked)
        ordered = self._asked["strategy"] == "in_order"
        return epochs.packed(planned, each, self.num_replicas, self._window, seed, self._drop_last, ordered)


def _place(num_replicas: int | None, rank: int | str | None) -> tuple[int, int | str]:
    """Ranks and rank: as given, else as torch.distributed knows, else as torchrun says, else one process."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        known = torch.distributed.get_world_size(), torch.distributed.get_rank()
    else:
        known = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if num_replicas is None:
        num_replicas = known[0]
    if rank is None:
        rank = known[1]
    if num_replicas < 1 or (rank != ALL_RANKS and not (isinstance(rank, int) and 0 <= rank < num_replicas)):
        raise PackingError(
            f"rank: expected one from 0 to num_replicas - 1, or 'all', found rank {rank!r} of {num_replicas}."
        )
    return num_replicas, rank
