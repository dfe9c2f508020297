"""Planners that decide which examples share a row. They take lengths and return indices, and never copy tokens."""

from .costs import ATTENTION_COST, example_costs, imbalance
from .errors import PackingError
from .plans import Plan, plan
from .samplers import PackedBatchSampler
from .strategies import STRATEGIES
from .streaming import Stream, stream

__all__ = [
    "ATTENTION_COST",
    "STRATEGIES",
    "PackedBatchSampler",
    "PackingError",
    "Plan",
    "Stream",
    "example_costs",
    "imbalance",
    "plan",
    "stream",
]
