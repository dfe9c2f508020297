"""Which pairs of an encoder-decoder share a row of sources and a row of targets, each with a budget of its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import PackingError
from .budget import as_lengths, check_budget
from .strategies import Floats, Ints, Ints32

OF_PAIRS = ("error", "drop")  # what may become of a pair that is too long; a cut source would lose its target

OPEN = 256  # rows that may still be filled; when another one begins, the fullest of them is closed


def as_pairs(lengths: Any) -> Ints:
    found = np.asarray(lengths)
    if found.shape == (0,):
        return np.empty((0, 2), np.int64)
    if found.ndim != 2 or found.shape[1] != 2:
        raise PackingError(
            "lengths: expected the tokens of each source and target, integers [examples, 2], for the two budgets of "
            f"max_tokens, found {found.dtype} {list(found.shape)}."
        )
    return np.stack([as_lengths(side) for side in found.T], axis=1)


def check_budgets(max_tokens: Any) -> Ints:
    if len(max_tokens) != 2:
        raise PackingError(f"max_tokens: expected the budgets of a row of sources and of targets, found {max_tokens}.")
    return np.array([check_budget(budget) for budget in max_tokens], np.int64)


def longer_pairs(lengths: Ints, budgets: Ints, too_long: str) -> Ints:
    """Return the pairs of which a side is longer than its budget."""
    over = np.flatnonzero((lengths > budgets).any(axis=1))
    if len(over) and too_long == "error":
        raise PackingError(
            f"{len(over)} of {len(lengths)} pairs are longer than max_tokens={tuple(budgets.tolist())}: the first is "
            f"example {over[0]} of {lengths[over[0], 0]} source and {lengths[over[0], 1]} target tokens. Raise "
            "max_tokens, or choose too_long='drop'."
        )
    return over


def best_fit_of_pairs(lengths: Ints, budgets: Ints) -> Ints32:
    """Give each pair, the largest first, to the fullest row in which both sides have space."""
    # This is best fit for vectors: the size of a pair is the larger share of its budgets that it takes, and a row is
    # full by the sum of its shares. Within 2 % of the fewest rows for translation, and 7 % for summaries.
    shares = lengths / budgets
    order = np.argsort(-shares.max(axis=1), kind="stable")
    row_of, rows, used = np.empty(len(lengths), np.int32), 0, 0
    space, number = np.zeros((2, OPEN), np.int64), np.zeros(OPEN, np.int32)
    for example, (source, target) in zip(order.tolist(), lengths[order].tolist()):
        fits = (space[0, :used] >= source) & (space[1, :used] >= target)
        left = _shares_left(space[:, :used], budgets)
        if fits.any():
            at = int(np.where(fits, left, np.inf).argmin())
        else:
            at = used if used < OPEN else int(left.argmin())
            used = min(used + 1, OPEN)
            space[:, at], number[at] = budgets, rows
            rows += 1
        space[:, at] -= (source, target)
        row_of[example] = number[at]
    return row_of


def _shares_left(space: Ints, budgets: Ints) -> Floats:
    return np.asarray(space[0] / budgets[0] + space[1] / budgets[1])


def pairs_in_order(lengths: Ints, budgets: Ints) -> Ints32:
    """Begin a row where a side of the next pair does not fit."""
    row_of, row, source, target = np.empty(len(lengths), np.int32), -1, np.inf, np.inf
    for example, (of_source, of_target) in enumerate(lengths.tolist()):
        source, target = source + of_source, target + of_target
        if source > budgets[0] or target > budgets[1]:
            row, source, target = row + 1, of_source, of_target
        row_of[example] = row
    return row_of


STRATEGIES_OF_PAIRS: dict[str, Any] = {"fewest_rows": best_fit_of_pairs, "in_order": pairs_in_order}


def strategy_of_pairs(strategy: str) -> Any:
    if strategy not in STRATEGIES_OF_PAIRS:
        raise PackingError(
            f"strategy: expected {' or '.join(STRATEGIES_OF_PAIRS)} for the two budgets of pairs, found {strategy!r}."
        )
    return STRATEGIES_OF_PAIRS[strategy]
