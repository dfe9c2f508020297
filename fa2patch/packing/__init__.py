"""Which examples share a row. Planners see lengths only and return indices: no token is touched, none is copied."""

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
