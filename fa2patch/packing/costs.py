"""What a row costs to train on, in tokens."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import PackingError
from .strategies import Ints

ATTENTION_COST = 1 / (12 * 4096)
"""What attention over a document of l tokens costs, by l squared, in what else a token costs: 1 / (12 x hidden size).

A forward takes 2 x 12 x layers x hidden**2 operations a token, and causal attention 2 x layers x hidden x l on average
(arXiv 2001.08361, section 2.1); the backward twice both. Here the hidden size is 4096, as of models of 7-8B.
"""


def example_costs(lengths: Ints, attention_cost: float = ATTENTION_COST) -> npt.NDArray[np.float64]:
    """Of each example: its tokens + attention_cost x their square. A row's cost is the sum over its documents."""
    return lengths + attention_cost * np.square(lengths, dtype=np.float64)


def check_attention_cost(attention_cost: Any) -> float:
    if isinstance(attention_cost, (int, float)) and math.isfinite(attention_cost) and attention_cost >= 0:
        return float(attention_cost)
    raise PackingError(f"attention_cost: expected a number from 0 (tokens only), found {attention_cost!r}.")


def imbalance(costs: npt.NDArray[np.float64]) -> float:
    """Of ``[steps, ranks]``: the costliest rank of a step by the step's mean, on average over steps.

    1.0 is balanced; a synchronous step takes as long as its costliest rank.
    """
    return float((costs.max(axis=1) / costs.mean(axis=1)).mean()) if costs.size else 1.0
