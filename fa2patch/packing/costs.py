"""The training cost of examples and rows, in tokens."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ..errors import PackingError
from .strategies import Ints

ATTENTION_COST = 1 / (12 * 4096)
"""Default cost of attention over a document of l tokens, per l**2: 1 / (12 x hidden size).

The unit is the cost of everything else for one token. A forward takes 2 x 12 x layers x hidden**2 operations per token,
and causal attention takes 2 x layers x hidden x l per token on average (arXiv 2001.08361, section 2.1). The backward
takes twice as many of both. The hidden size is 4096, as in models of 7-8B.
"""


def example_costs(lengths: Ints, attention_cost: float = ATTENTION_COST) -> npt.NDArray[np.float64]:
    """Return ``lengths + attention_cost * lengths**2``, ``[examples]``. A row's cost is the sum over its documents."""
    return lengths + attention_cost * np.square(lengths, dtype=np.float64)


def check_attention_cost(attention_cost: object) -> float:
    """Return the option as a float, or raise :class:`PackingError` unless it is finite and at least 0."""
    if isinstance(attention_cost, (int, float)) and math.isfinite(attention_cost) and attention_cost >= 0:
        return float(attention_cost)
    raise PackingError(f"attention_cost: expected a number from 0 (tokens only), found {attention_cost!r}.")


def imbalance(costs: npt.NDArray[np.float64]) -> float:
    """Return the ratio of a step's highest cost to its mean cost, averaged over steps.

    1.0 is perfectly balanced. A synchronous step takes as long as its costliest rank.

    Args:
        costs: ``[steps, ranks]``.
    """
    return float((costs.max(axis=1) / costs.mean(axis=1)).mean()) if costs.size else 1.0
