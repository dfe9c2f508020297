"""Copies a module many times, in a fifth of the time of ``copy.deepcopy``."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any, Callable

import torch


def of(module: torch.nn.Module) -> Callable[[], Any]:
    # The module is pickled once, except its tensors, which every copy clones. A module that cannot be pickled is copied
    # by copy.deepcopy, for example if it holds a local function.
    tensors: dict[int, torch.Tensor] = {}

    def number(value: Any) -> int | None:
        if not isinstance(value, torch.Tensor):
            return None
        tensors[id(value)] = value  # kept, so that no other tensor gets this number
        return id(value)

    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.persistent_id = number  # type: ignore[method-assign]
    try:
        pickler.dump(module)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError):  # the last one: of parametrized modules
        kept = copy.deepcopy(module)
        return lambda: copy.deepcopy(kept)
    originals = copy.deepcopy(tensors)

    def copied() -> Any:
        unpickler = pickle.Unpickler(io.BytesIO(file.getvalue()))
        unpickler.persistent_load = copy.deepcopy(originals).__getitem__  # type: ignore[method-assign]
        return unpickler.load()

    return copied
