"""``plan``, which packs lengths into rows, and the :class:`Plan` that it returns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from ..errors import PackingError
from .budget import as_lengths, check_budget, check_policy, cut, cut_out
from .pairs import OF_PAIRS, as_pairs, check_budgets, longer_pairs, strategy_of_pairs
from .strategies import STRATEGIES, Ints, Strategy, by_key, fewest, mini_batches

MINI_BATCHES = "mini_batches"


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Sequence[Ints]):
    """A sequence of rows. Each row holds the indices of its examples, int64 ``[examples]``.

    Cut examples (``too_long="split"`` or ``"truncate"``) keep their index, so ``dataset[index]`` means the same under
    every policy. A split example is in several rows. ``pieces(row)`` tells which of an example's tokens are in a
    row, and ``examples(dataset, row)`` cuts them out.

    Attributes:
        indices: Examples of all rows, row after row, int64 ``[pieces]``. Indexing returns views of this array.
        offsets: Start of each row in ``indices``, and the end, int64 ``[rows + 1]``.
        tokens: Number of tokens in each row, int64 ``[rows]``.
        max_tokens: Budget of a row. ``mini_batches`` has no budget, so this is the number of tokens in its longest row.
        lengths: Lengths of the examples as passed to :func:`plan`. An int64 array is not copied: do not change it.
        dropped: Examples that are in no row (``too_long="drop"``), in ascending order.
        truncated: Examples whose end is in no row (``too_long="truncate"``), in ascending order.
        empty: Examples that are in no row because they have no tokens, in ascending order. Of pairs, those without a
            source or without a target.
        of_pairs: Whether the rows are of pairs. Then ``tokens`` and ``lengths`` count sources and targets together, and
            ``max_tokens`` is the sum of both budgets.
    """

    indices: Ints
    offsets: Ints
    tokens: Ints
    max_tokens: int
    lengths: Ints
    dropped: Ints
    truncated: Ints
    empty: Ints
    _cuts: tuple[Ints, Ints] | None = field(default=None)
    of_pairs: bool = False

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, row: int) -> Ints: ...
    @overload
    def __getitem__(self, row: slice) -> list[Ints]: ...
    def __getitem__(self, row: int | slice) -> Ints | list[Ints]:
        if isinstance(row, slice):
            return [self[at] for at in range(*row.indices(len(self)))]
        return self.indices[self._slice(row)]

    def __iter__(self) -> Iterator[Ints]:
        ends = self.offsets.tolist()
        return (self.indices[start:stop] for start, stop in zip(ends, ends[1:]))

    def __repr__(self) -> str:
        said = f"{len(self)} rows of at most {self.max_tokens} tokens, {self.fill:.2%} full"
        for name in ("dropped", "truncated", "empty"):
            if len(getattr(self, name)):
                said += f", {len(getattr(self, name))} examples {name}"
        return f"<Plan: {said}>"

    def _slice(self, row: int) -> slice:
        row = range(len(self))[row]
        return slice(int(self.offsets[row]), int(self.offsets[row + 1]))

    @property
    def rows(self) -> list[Ints]:
        """All rows as a list."""
        return list(self)

    @property
    def bins(self) -> int:
        """Number of rows."""
        return len(self)

    @cached_property
    def lower_bound(self) -> int:
        """Lower bound on the number of rows of any plan of these pieces.

        It is tokens / max_tokens, rounded up, or more where the lengths do not let rows be filled: see
        :func:`~.strategies.fewest`.
        """
        pieces = self.lengths[self.indices] if self._cuts is None else self._cuts[1] - self._cuts[0]
        sizes, counts = np.unique(pieces, return_counts=True)
        return fewest(sizes, counts, self.max_tokens)

    @cached_property
    def fill(self) -> float:
        """Fraction of the rows' budget that is filled with tokens; 1.0 if there are no rows."""
        return int(self.tokens.sum()) / (len(self) * self.max_tokens) if len(self) else 1.0

    @property
    def tokens_left_out(self) -> int:
        """Number of tokens in dropped examples and truncated ends."""
        return int(self.lengths.sum() - self.tokens.sum())

    def pieces(self, row: int) -> Ints:
        """Return (example, start, stop) of each document in a row, int64 ``[documents, 3]``."""
        where = self._slice(row)
        examples = self.indices[where]
        if self._cuts is None:
            return np.stack([examples, np.zeros_like(examples), self.lengths[examples]], axis=1)
        return np.stack([examples, self._cuts[0][where], self._cuts[1][where]], axis=1)

    def examples(self, dataset: Any, row: int) -> list[Any]:
        """Return a row's examples, read from ``dataset[index]`` and cut as planned, ready for a collator.

        In a mapping, every value with as many items as the example has tokens is cut.

        Raises:
            PackingError: The length of an example is not the one that was planned.
        """
        cuts = self.pieces(row).tolist()
        return [cut_out(dataset[index], start, stop, int(self.lengths[index])) for index, start, stop in cuts]


def plan(
    lengths: Sequence[int] | Sequence[tuple[int, int]] | npt.NDArray[Any],
    max_tokens: int | tuple[int, int] | None,
    strategy: str = "fewest_rows",
    *,
    too_long: str = "error",
    seed: int | Sequence[int] | None = 0,
    batch_size: int | None = None,
) -> Plan:
    """Decide which examples share a row, from their lengths alone. A million lengths take about a tenth of a second.

    :mod:`fa2patch.packing` describes how packing to a budget affects training.

    Args:
        lengths: Tokens of each example, ``[examples]``. Those without tokens are in no row; ``Plan.empty`` lists them.
            For an encoder-decoder, the tokens of each source and target, ``[examples, 2]``.
        max_tokens: Maximum number of tokens in a row. Must be None for ``mini_batches``, and only there. For pairs, two
            numbers, of the row of sources and of the row of targets: both are filled at once, by ``fewest_rows`` or
            ``in_order``, and ``too_long`` is ``"error"`` or ``"drop"``. A million pairs take about ten seconds.
        strategy: The algorithm that fills the rows.

            - ``fewest_rows``: The rows of ``best_fit_decreasing`` or, if they are fewer, rows of k and of k + 1
              examples with sums just below the budget. Within 0.5 % of the fewest possible for most data;
              ``Plan.lower_bound`` says what is possible.
            - ``best_fit_decreasing``: Longest first, each into the fullest row that has space for it. If rows hold a
              few examples of nearly one length, they stay 1-6 % emptier than need be.
            - ``first_fit_decreasing``: Longest first, each into the oldest row that has space for it.
            - ``in_order``: In the given order, with a new row if the next example does not fit; for curricula. It
              makes 3-33 % more rows at budgets of 4-8 thousand tokens.
            - ``sorted``: Longest first, with a new row if the next example does not fit. The examples of a row have
              similar lengths, and with a seed the rows come in random order (grouping by length, then a shuffle of
              whole batches).
            - ``mini_batches``: ``batch_size`` examples per row, of any length, as a DataLoader makes them without a
              plan.
        too_long: Policy for examples longer than ``max_tokens``: ``"error"``, ``"drop"``, ``"truncate"`` (the end is
            lost) or ``"split"`` (each piece is a document of its own: it does not see the piece before it, and its
            first token is not predicted). ``Plan.dropped``, ``Plan.truncated`` and ``Plan.tokens_left_out`` report
            what is lost.
        seed: Seed for the order of rows, the order of examples in a row, and the choice among examples of equal
            length. Without a shuffle, training would see rows sorted by length. With None, and always with
            ``in_order``, rows stay as the strategy makes them. The same seed and lengths give the same plan in every
            process (numpy guarantees its random numbers per version; 1.26 and 2.4 agree).
        batch_size: Examples per row, only for ``mini_batches``.

    Raises:
        PackingError: An example is longer than the budget and ``too_long="error"``, lengths are not integers from 0,
            the strategy or policy is unknown, or ``max_tokens`` or ``batch_size`` is invalid for the strategy.
    """
    rng = None if seed is None or strategy == "in_order" else np.random.default_rng(seed)
    if isinstance(max_tokens, (tuple, list)):
        return _plan_of_pairs(as_pairs(lengths), check_budgets(max_tokens), strategy, too_long, rng)
    given = as_lengths(lengths)
    fill, limit = strategy_of(strategy, max_tokens, batch_size)
    pieces = cut(given, 2**31 if fill is mini_batches else limit, too_long)
    rows, offsets = _rows(pieces.lengths.astype(np.int32), fill, limit, rng)
    tokens = np.add.reduceat(pieces.lengths[rows], offsets[:-1]) if len(rows) else np.empty(0, np.int64)
    budget = int(tokens.max(initial=1)) if fill is mini_batches else limit
    left_out = pieces.dropped, pieces.truncated, np.flatnonzero(given == 0)
    if pieces.cuts is None:
        return Plan(rows, offsets, tokens, budget, given, *left_out)
    indices, start, stop = (of_pieces[rows] for of_pieces in pieces.cuts)
    return Plan(indices, offsets, tokens, budget, given, *left_out, (start, stop))


def _plan_of_pairs(lengths: Ints, budgets: Ints, strategy: str, too_long: str, rng: np.random.Generator | None) -> Plan:
    check_policy(too_long, OF_PAIRS)
    over = longer_pairs(lengths, budgets, too_long)
    empty = np.flatnonzero((lengths == 0).any(axis=1))
    kept = np.delete(np.arange(len(lengths)), np.union1d(over, empty))
    rows, offsets = _rows(lengths[kept], strategy_of_pairs(strategy), budgets, rng)
    both = lengths.sum(axis=1)
    tokens = np.add.reduceat(both[kept][rows], offsets[:-1]) if len(rows) else np.empty(0, np.int64)
    left_out = over, np.empty(0, np.int64), np.setdiff1d(empty, over)
    return Plan(kept[rows], offsets, tokens, int(budgets.sum()), both, *left_out, of_pairs=True)


def strategy_of(strategy: str, max_tokens: int | None, batch_size: int | None) -> tuple[Strategy, int]:
    # The number is the strategy's limit: the tokens of a row, or its examples for mini-batches.
    if strategy == MINI_BATCHES:
        if max_tokens is not None or batch_size is None or batch_size < 1:
            raise PackingError(
                f"mini_batches: expected batch_size examples and no budget, found batch_size={batch_size} and "
                f"max_tokens={max_tokens}. Pass None for max_tokens, or choose a strategy that has a budget."
            )
        return mini_batches, batch_size
    if strategy not in STRATEGIES:
        raise PackingError(f"strategy: expected one of {', '.join([*STRATEGIES, MINI_BATCHES])}, found {strategy!r}.")
    budget = check_budget(max_tokens)
    if batch_size is not None:
        raise PackingError(f"batch_size: only mini_batches take it, found {batch_size} with {strategy}.")
    return STRATEGIES[strategy], budget


def _rows(lengths: Any, fill: Any, limit: Any, rng: np.random.Generator | None) -> tuple[Ints, Ints]:
    # Returned are the examples of all rows, and the offsets of the rows. Pairs have two lengths and two limits.
    drawn = None
    if rng is not None:  # a random order, so that the choice among equal lengths is random
        drawn = rng.permutation(np.arange(len(lengths), dtype=np.int32))
        lengths = lengths[drawn]
    row_of = fill(lengths, limit)
    del lengths
    counts = np.bincount(row_of)
    if rng is not None and fill is not mini_batches:  # the examples of mini-batches are in random order already
        place = rng.permutation(np.arange(len(counts), dtype=np.int32))
        row_of = place[row_of]
        counts[place] = counts.copy()
    order = by_key(row_of)
    del row_of
    rows = order if drawn is None else drawn[order]
    return rows.astype(np.int64), np.append(0, np.cumsum(counts))
