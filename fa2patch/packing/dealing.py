"""Deal the examples of a global batch to ranks that make the same number of passes, each within a budget of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import PackingError
from .budget import as_lengths, capped, check_budget, positive
from .strategies import Floats, Ints, dealt, fewest, parted

ATTENTION_COST = 1 / (12 * 4096)
"""Default cost of attention over a document of l tokens, per l**2: 1 / (12 x hidden size).

The unit is the cost of everything else for one token. A forward takes 2 x 12 x layers x hidden**2 operations per token,
and causal attention takes 2 x layers x hidden x l per token on average (arXiv 2001.08361, section 2.1). The backward
takes twice as many of both. The hidden size is 4096, as in models of 7-8B.
"""


def example_costs(lengths: Ints, attention_cost: float = ATTENTION_COST) -> Floats:
    """Return ``lengths + attention_cost * lengths**2``, ``[examples]``. A row's cost is the sum over its documents."""
    return lengths + attention_cost * np.square(lengths, dtype=np.float64)


@dataclass(frozen=True, eq=False, repr=False)
class Deal:
    """What each rank computes of a global batch, and in which passes.

    Every rank has the same number of passes. Each example with tokens is in one pass of one rank. A pass is empty only
    if its rank has fewer examples than passes. The last passes of a rank are then the empty ones, and the rank must run
    them all the same, with a loss of weight zero, because the others wait for it in them (FSDP, ZeRO-3).

    Attributes:
        passes: Examples of each pass of each rank, int64 ``[examples]``, in the order of ``batches``. A rank's
            costliest pass comes first.
        batches: Examples of each rank, int64 ``[examples]``, in the order in which ``deal(lengths[batch], 1,
            max_tokens, passes=number)`` makes just these passes.
        costs: Cost of each pass, float64 ``[ranks, passes]``, in units of the cost of a token without attention.
        fewest_passes: Lower bound on the number of passes in any deal of these examples.
        least_cost: Lower bound on the cost of the costliest rank in any deal of these examples.
        empty: Examples that are in no pass because they have no tokens, int64 ``[examples]``.
    """

    passes: list[list[Ints]]
    batches: list[Ints]
    costs: Floats
    fewest_passes: int
    least_cost: float
    empty: Ints

    def __len__(self) -> int:
        """Number of passes that each rank makes."""
        return int(self.costs.shape[1])

    def __repr__(self) -> str:
        ranks, passes = self.costs.shape
        most = self.costs.sum(axis=1).max()
        left_out = f", {len(self.empty)} examples empty" if len(self.empty) else ""
        return (
            f"<Deal: {ranks} ranks, {passes} passes each (at least {self.fewest_passes}), costliest rank {most:.0f} "
            f"(at least {self.least_cost:.0f}){left_out}>"
        )


def deal(
    lengths: Sequence[int] | npt.NDArray[Any],
    ranks: int,
    max_tokens: int,
    *,
    passes: int | None = None,
    attention_cost: float = ATTENTION_COST,
    too_long: str = "error",
) -> Deal:
    """Deal the examples of one global batch, which is what is learned in an optimizer step, to ranks.

    All ranks make the same number of passes, as few as the budget allows, and the costliest rank has as little to do
    as can be. The result is a function of the arguments: every process computes the same, without communication.

    One result serves whatever makes ranks wait for each other. Under DDP with ``no_sync`` they wait at the end of a
    step, so that the costliest rank counts: examples go, costliest first, to the rank with the lowest cost so far, and
    then the costliest rank exchanges some of its own until it is within a thousandth of the mean, or cannot be cheaper.
    Under FSDP and ZeRO-3 they wait in every pass, so that the costliest of the k-th passes count: each rank fills its
    passes in the same way, longest first into the fullest pass with space. That neither changes what a rank computes
    in all, nor its number of passes.

    A rank that was dealt a batch cuts it into its passes with this function, too: ``deal(lengths[batch], 1,
    max_tokens, passes=number)`` makes the passes that were planned for it.

    Args:
        lengths: Tokens of each example, ``[examples]``. Those without tokens are in no pass; ``Deal.empty`` lists them.
        ranks: Number of ranks, or of groups of ranks that compute the same rows.
        max_tokens: Maximum number of tokens in a pass.
        passes: Number of passes that each rank makes. Default: as few as possible.
        attention_cost: Cost of attention over a document of l tokens, per l**2, in units of the other costs of a token.
        too_long: Policy for examples longer than ``max_tokens``: ``"error"``, or ``"alone"``, which gives each one a
            pass of its own.

    Raises:
        PackingError: An example is longer than the budget and ``too_long="error"``, the examples need more passes than
            ``passes``, lengths are not integers from 0, or an option is invalid.
    """
    given, budget = as_lengths(lengths), check_budget(max_tokens)
    cost = check_attention_cost(attention_cost)
    positive("ranks", ranks)
    positive("passes", 1 if passes is None else passes)
    kept = np.flatnonzero(given)
    sizes, costs = capped(given, budget, too_long)[kept], example_costs(given[kept], cost)
    found = dealt(sizes, costs, ranks, budget, passes)
    if passes is not None and found.passes > passes:
        raise PackingError(
            f"passes={passes}: expected as many as hold the examples, but {ranks} ranks need {found.passes} passes of "
            f"at most {budget} tokens. Give more passes, or raise max_tokens. Cut a batch that was dealt in its own "
            "order, with the max_tokens and too_long of the deal."
        )
    number = found.passes
    of_passes = [kept[each] for each in parted(found.order, found.pass_of, ranks * number)]
    return Deal(
        [of_passes[first : first + number] for first in range(0, ranks * number, number)],
        [kept[batch] for batch in parted(found.order, found.pass_of // number, ranks)],
        np.bincount(found.pass_of, costs, ranks * number).astype(np.float64).reshape(ranks, number),
        max(1, -(-fewest(*np.unique(sizes, return_counts=True), budget) // ranks)),
        _least(costs, ranks),
        np.flatnonzero(given == 0),
    )


def check_attention_cost(attention_cost: object) -> float:
    if isinstance(attention_cost, (int, float)) and math.isfinite(attention_cost) and attention_cost >= 0:
        return float(attention_cost)
    raise PackingError(f"attention_cost: expected a number from 0 (tokens only), found {attention_cost!r}.")


def _least(costs: Floats, ranks: int) -> float:
    # Some rank costs at least the mean. Of the j * ranks + 1 costliest examples, some rank has j + 1, which cost at
    # least as much as the j + 1 cheapest of them.
    until = np.append(0, np.cumsum(np.sort(costs)[::-1]))
    upto = np.arange(1, len(until), ranks)
    return float(max(until[-1] / ranks, (until[upto] - until[upto - 1 - np.arange(len(upto))]).max(initial=0)))
