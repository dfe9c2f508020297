"""The metrics that a trainer notes while it computes losses: lists of numbers, by name, in its attributes."""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

Lists = dict[int, tuple[list[Any], int]]
"""Lists of numbers and their lengths, by the lists' ids."""


@contextlib.contextmanager
def untouched(trainer: Any, model: torch.nn.Module) -> Iterator[None]:
    """Let a trainer compute losses in evaluation and without gradients, and put back what it notes of them."""
    noted = {name: copy.deepcopy(value) for name, value in vars(trainer).items() if _is_plain(value)}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()
        vars(trainer).update(noted)


def _is_plain(value: Any) -> bool:
    """Whether a value is a collection of numbers and texts."""
    if isinstance(value, Mapping):
        return all(_is_plain(each) for each in value.values())
    if isinstance(value, (list, tuple, deque, set)):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, (bool, int, float, str))


def lists(trainer: Any) -> Lists:
    """Return all lists of numbers in the mappings that a trainer holds."""
    found: Lists = {}
    waiting = [value for value in vars(trainer).values() if isinstance(value, Mapping)]
    while waiting:
        for value in waiting.pop().values():
            if isinstance(value, list) and all(isinstance(each, (int, float)) for each in value):
                found[id(value)] = value, len(value)
            elif isinstance(value, Mapping):
                waiting.append(value)
    return found


def merge(trainer: Any, before: Lists, weights: Sequence[float]) -> None:
    """Put one number in the place of those that the passes of a batch have noted in each list: their weighed mean."""
    for key, (values, _) in lists(trainer).items():
        length = before[key][1] if key in before else 0
        new = values[length:]
        if len(new) == len(weights) > 1:
            values[length:] = [float(np.average(new, weights=weights))]
