"""``torch`` in the globals of a formula: products of queries and keys are not computed, nor is room made for them.

It is a module, because dynamo looks a module among a function's globals up by its name.
"""

from __future__ import annotations

from typing import Any

import torch

from .scores import Scores, product

matmul = bmm = product


def baddbmm(added: torch.Tensor, first: torch.Tensor, second: torch.Tensor, *, beta: float, alpha: float) -> Scores:
    # What the scores would be added to is empty or 0.
    scores: Scores = product(first, second)
    return scores * alpha


def empty(*size: Any, **options: Any) -> torch.Tensor:
    # Scores would be added to it, so it needs no memory.
    return torch.empty((), **{**options, "device": "meta"}).expand(*size)


zeros = empty


def __getattr__(name: str) -> Any:
    return getattr(torch, name)
