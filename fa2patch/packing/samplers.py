"""Batch sampler for DataLoader that gives each rank one packed row per step, and what a row costs."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from ..errors import PackingError
from . import epochs
from .budget import as_lengths, check_budget, check_policy, longer, positive
from .dealing import ATTENTION_COST, check_attention_cost, example_costs
from .epochs import Epoch
from .pairs import as_pairs, check_budgets, longer_pairs, strategy_of_pairs
from .plans import MINI_BATCHES, plan, strategy_of
from .ranks import ALL_RANKS, replicas_and_rank
from .strategies import Ints

ANY_TOKENS = 2**62  # the budget of mini-batches without one


def imbalance(costs: npt.NDArray[np.float64]) -> float:
    """Return the ratio of a step's highest cost to its mean cost, averaged over steps.

    1.0 is perfectly balanced. A synchronous step takes as long as its costliest rank.

    Args:
        costs: ``[steps, ranks]``.
    """
    return float((costs.max(axis=1) / costs.mean(axis=1)).mean()) if costs.size else 1.0


class PackedBatchSampler(Sampler[list[int]]):
    """Batch sampler for ``DataLoader``: lists of example indices, one packed row per step and rank.

    Rows of similar cost share a step, because a step takes as long as its costliest rank::

        sampler = fa2patch.packing.PackedBatchSampler(lengths, max_tokens=8192)
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=fa2patch.DataCollatorWithFlattening())
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for batch in loader: ...

    Ranks do not communicate: each makes the same plan and takes its own rows. All ranks have the same number of steps.
    In an epoch, every example is in exactly one row of one rank, except those in ``dropped``, ``empty``, ``repeated``
    and ``left_out``.

    accelerate and Trainer distribute batches to processes themselves, in turn: give them the rows of all ranks with
    ``rank="all"``. Ranks that compute a row together (tensor and context parallelism) all get the same row, and rows
    are balanced over such groups. Under DeepSpeed's Ulysses each rank needs a row of its own. What else these need is
    said in docs/packing.md.

    **Effect on training.** A token budget packs more examples into a step, so there are fewer optimizer steps: see
    :mod:`fa2patch.packing`. ``strategy="mini_batches"`` with ``batch_size=n`` keeps both the number of steps and their
    contents: every n x ranks examples in random order are a step, distributed to the ranks by cost instead of by
    number. Ranks hold different numbers of tokens (and examples), so the loss must be normalised over the labels of all
    ranks and not averaged over ranks; in Trainer, set ``average_tokens_across_devices=True``. With any other strategy,
    the rows of a step are similar: many short documents, or a few long ones, on all ranks at once. The steps come in
    random order, another one in each epoch. So ``strategy="sorted"`` groups examples by length, and shuffles whole rows
    afterwards: neighbouring steps are not alike. Only an incomplete last step stays last.

    **Mini-batches with a budget.** ``max_tokens`` says how mini-batches are computed, and not what they hold: each
    rank's batch of a step is computed in several passes of at most so many tokens, whose gradients add up. The batches
    are dealt so that all ranks need the same number of passes, ``passes[step]``::

        sampler = fa2patch.packing.PackedBatchSampler(lengths, 8192, strategy="mini_batches", batch_size=64)
        for step, batch in enumerate(sampler):
            cut = fa2patch.packing.deal(lengths[batch], 1, 8192, passes=int(sampler.passes[step]))
            for rows in cut.passes[0]: ...  # rows[i] is the place of an example in the batch

    Args:
        lengths: Tokens of each example, ``[examples]``. Those without tokens are left out. For an encoder-decoder, the
            tokens of each source and target, ``[examples, 2]``.
        max_tokens: Maximum number of tokens in a row; with ``mini_batches``, in a pass, or None for a single pass of
            any size. For pairs, two numbers, of the row of sources and of the row of targets.
        num_replicas: Number of ranks or, with several ranks per row, of groups. Default: the number of processes (from
            torch.distributed if it is initialised, else ``WORLD_SIZE`` as torchrun sets it, else 1) divided by
            ``ranks_per_row``.
        rank: This rank or group, or ``"all"``. Default: this process's rank (from torch.distributed if it is
            initialised, else ``RANK``, else 0) divided by ``ranks_per_row`` and rounded down.
        ranks_per_row: Number of processes, with consecutive ranks, that get the same row. Do not pass it together with
            ``num_replicas`` or a number as ``rank``. Default: from accelerate if an Accelerator exists, else 1.
        seed: Seed of all random choices, together with the epoch.
        strategy: See :func:`fa2patch.packing.plan`. ``in_order`` keeps the order of examples over steps and ranks in
            every epoch, so rows are not balanced.
        too_long: ``"error"`` or ``"drop"``. An index cannot express a cut: to truncate or split, cut the dataset. With
            ``mini_batches``, also ``"alone"``: an example longer than the budget gets a pass of its own.
        batch_size: Average number of examples per rank and step, only for ``mini_batches``.
        global_batch_size: Number of examples per step, in place of ``batch_size``. Any number of ranks shares them, so
            that an epoch can go on with another number of ranks.
        attention_cost: Cost of attention over a document of l tokens, per l**2, in units of the other costs of a token.
            1 / (12 x hidden size) is a good guess; 0 balances tokens.
        window: Number of steps among which rows are exchanged for balance. Fewer steps mix rows more, more steps
            balance better.
        drop_last: Leave out the last step if it is incomplete. Otherwise its examples are divided among all ranks, with
            other rows if they are too few, and rows are repeated only if no row can be divided any more. With
            ``mini_batches``, examples are repeated if fewer examples than ranks are left.

    Attributes:
        dropped: Examples longer than the budget, which are in no epoch (``too_long="drop"``).
        empty: Examples without tokens, which are in no epoch.
        epoch: The current epoch.
        global_batch_size: Number of examples in a step of ``mini_batches``, else None.
        num_replicas: Number of rows in a step.
        rank: Which of a step's rows this process gets, or ``"all"``.

    Raises:
        PackingError: In the cases of ``plan``; ``rank``, ``num_replicas``, ``ranks_per_row``, ``window``,
            ``attention_cost``, ``too_long`` or ``global_batch_size`` is invalid; or ``ranks_per_row`` does not divide
            the number of processes or is not what accelerate does.
    """

    batch_size = None  # for accelerate: the number of examples differs between batches
    drop_last = False  # for accelerate: it must not drop any of these batches
    _made: tuple[int, Epoch] | None = None

    def __init__(
        self,
        lengths: Sequence[int] | Sequence[tuple[int, int]] | npt.NDArray[Any],
        max_tokens: int | tuple[int, int] | None,
        num_replicas: int | None = None,
        rank: int | str | None = None,
        *,
        ranks_per_row: int | None = None,
        seed: int = 0,
        strategy: str = "fewest_rows",
        too_long: str = "error",
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        attention_cost: float = ATTENTION_COST,
        window: int = 64,
        drop_last: bool = False,
    ) -> None:
        pairs = isinstance(max_tokens, (tuple, list))
        self.lengths = as_pairs(lengths) if pairs else as_lengths(lengths)
        self.num_replicas, self.rank = replicas_and_rank(num_replicas, rank, ranks_per_row)
        policies = ("error", "drop", "alone") if strategy == MINI_BATCHES else ("error", "drop")
        check_policy(too_long, policies, " Cut the dataset before it is sampled.")
        positive("window", window, "number of steps")
        self._asked: dict[str, Any] = {"max_tokens": max_tokens, "strategy": strategy, "too_long": too_long}
        self._attention_cost = check_attention_cost(attention_cost)
        self._window, self._drop_last, self._seed = window, drop_last, seed
        self.epoch = self._resume = self._step = self._first = 0
        self.global_batch_size = self._global(batch_size, global_batch_size)
        over = np.empty(0, np.int64)
        if isinstance(max_tokens, (tuple, list)):
            strategy_of_pairs(strategy)
            over = longer_pairs(self.lengths, check_budgets(max_tokens), too_long)
        elif self.global_batch_size is None:
            strategy_of(strategy, max_tokens, None)  # checks both
        if not pairs and max_tokens is not None:
            over = longer(self.lengths, check_budget(max_tokens), too_long, policies)
        self.dropped = over if too_long == "drop" else over[:0]
        without = self.lengths == 0
        self.empty = np.setdiff1d(np.flatnonzero(without.any(axis=1) if pairs else without), self.dropped)

    def _global(self, batch_size: int | None, global_batch_size: int | None) -> int | None:
        # The number of examples in a step; None where tokens fill the rows of a step.
        strategy, ranks = self._asked["strategy"], self.num_replicas
        sizes = [size for size in (batch_size, global_batch_size) if size is not None]
        if strategy != MINI_BATCHES and not sizes:
            return None
        named = f"batch_size={batch_size!r} and global_batch_size={global_batch_size!r}"
        if strategy != MINI_BATCHES:
            raise PackingError(f"batch_size: only mini_batches take it, found {named} with {strategy}.")
        if len(sizes) == 1 and isinstance(sizes[0], (int, np.integer)) and not isinstance(sizes[0], bool):
            found = int(sizes[0]) * (1 if batch_size is None else ranks)
            if found >= ranks:
                return found
        raise PackingError(
            "mini_batches: expected batch_size, the examples of a rank, or global_batch_size, those of all "
            f"{ranks} ranks, at least one for each of them, found {named}."
        )

    @property
    def sampler(self) -> PackedBatchSampler:
        """This sampler itself. accelerate calls ``set_epoch`` on this attribute."""
        return self

    @property
    def repeated(self) -> Ints:
        """Examples that are repeated in this epoch's last step, once for each repetition."""
        return self._rows.repeated

    @property
    def left_out(self) -> Ints:
        """Examples that this epoch leaves out because of ``drop_last``."""
        return self._rows.left_out

    @property
    def passes(self) -> Ints:
        """Number of passes that every rank makes in each step of this epoch, int64 ``[steps]``.

        It is 1 unless mini-batches have a budget. :func:`fa2patch.packing.deal` cuts a rank's batch into so many. A
        step has fewer examples than ranks x passes only if it is the last, or if a rank's few examples cost as much as
        the many of other ranks: then some passes are empty, and are run all the same.
        """
        return self._rows.passes

    def __len__(self) -> int:
        """Number of steps of an iteration, the same on every rank; with ``rank="all"``, number of rows.

        An iteration that goes on at a loaded state has only the rest of the epoch, and Trainer knows the last step by
        this number. It is that of the iteration that has begun last, or of the next one if a state has been loaded or
        an epoch set since.
        """
        rows = len(self._rows.offsets) - 1 - self._first * self.num_replicas
        return rows if self.rank == ALL_RANKS else rows // self.num_replicas

    def __iter__(self) -> Iterator[list[int]]:
        rows = self._rows
        first, every = (0, 1) if isinstance(self.rank, str) else (self.rank, self.num_replicas)
        self._step = self._first = self._resume
        self._resume = 0
        for row in range(first + self._step * self.num_replicas, len(rows.offsets) - 1, every):
            self._step = row // self.num_replicas + 1
            yield rows.row(row)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch. Call this before each epoch, or every epoch has the same order."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._resume = self._step = self._first = 0

    def costs(self) -> npt.NDArray[np.float64]:
        """Return the cost of each row of this epoch, ``[steps, ranks]``, in tokens."""
        rows = self._rows
        each = self._example_costs[rows.indices]
        found = np.add.reduceat(each, rows.offsets[:-1]) if len(each) else each
        return found.reshape(-1, self.num_replicas)

    def state_dict(self, steps: int | None = None) -> dict[str, int]:
        """Return the position in this epoch, for :meth:`load_state_dict`.

        Args:
            steps: Number of steps trained in this epoch. Default: the steps that this sampler has yielded. Pass the
                number with a DataLoader that has workers, because its prefetching runs ahead of training.
        """
        given = self._step if steps is None else steps
        found = {"epoch": self.epoch, "step": given, "fingerprint": self._fingerprint}
        return found if self.global_batch_size is None else {**found, "global_batch_size": self.global_batch_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the next iteration at the state's step, unless another epoch is set before it.

        Raises:
            PackingError: The state is from a sampler with other lengths or options, including ``num_replicas``. The
                number of ranks per row may differ. With ``mini_batches``, whatever does not change which examples a
                step holds may differ: the number of ranks if ``global_batch_size`` (or batch_size x ranks) is the
                same, the budget and the attention cost.
        """
        if state["fingerprint"] != self._fingerprint:
            was, now = state.get("global_batch_size"), self.global_batch_size
            sizes = f" Its steps hold {was} examples, and these {now}: pass global_batch_size={was}."
            raise PackingError(
                "the state belongs to a sampler with other lengths, ranks, seed or options, whose steps hold other "
                "examples. Make the sampler with the same arguments, or start a new epoch."
                + (sizes if now is not None and was not in (None, now) else "")
            )
        self.epoch = int(state["epoch"])
        self._resume = self._step = self._first = int(state["step"])

    @property
    def _fingerprint(self) -> int:
        """A number that tells samplers apart whose steps hold other examples."""
        if self.global_batch_size is not None:
            options: Any = MINI_BATCHES, self.global_batch_size, self._drop_last, self._seed, self.dropped.tolist()
        else:
            dealt = self._attention_cost, self._window, self._drop_last, self.num_replicas
            options = sorted(self._asked.items()), dealt, self._seed
        return zlib.crc32(repr(options).encode(), zlib.crc32(self.lengths.tobytes()))

    @property
    def _example_costs(self) -> npt.NDArray[np.float64]:
        costs = example_costs(self.lengths, self._attention_cost)
        return costs if costs.ndim == 1 else costs.sum(axis=1)

    @property
    def _rows(self) -> Epoch:
        if self._made is None or self._made[0] != self.epoch:
            self._made = self.epoch, self._plan()
        return self._made[1]

    def _plan(self) -> Epoch:
        # These are the rows of all ranks, and every rank computes the same.
        each, seed = self._example_costs, (self._seed, self.epoch)
        if self.global_batch_size is not None:
            budget = self._asked["max_tokens"] or ANY_TOKENS
            kept = np.delete(np.arange(len(each)), np.concatenate([self.dropped, self.empty]))
            what = kept, self.global_batch_size, seed, self._drop_last
            return epochs.of_mini_batches(*what, np.minimum(self.lengths, budget), each, self.num_replicas, budget)
        planned = plan(self.lengths, seed=seed, **self._asked)
        ordered = self._asked["strategy"] == "in_order"
        return epochs.of_plan(planned, each, self.num_replicas, self._window, seed, self._drop_last, ordered)
