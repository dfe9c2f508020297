"""Copies a module many times, in a fifth of the time of ``copy.deepcopy``."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any, Callable

import torch


def of(module: torch.nn.Module) -> Callable[[], Any]:
    """Return a function that makes deep copies of a module as it is now.

    The module is pickled once, except its tensors, which every copy clones. A module that cannot be pickled is copied
    by ``copy.deepcopy``, for example if it holds a local function.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(module)
    except (pickle.PicklingError, AttributeError, TypeError):
        kept = copy.deepcopy(module)
        return lambda: copy.deepcopy(kept)
    return lambda: _Unpickler(io.BytesIO(file.getvalue()), pickler.tensors).load()


class _Pickler(pickle.Pickler):
    """Keeps copies of tensors beside the pickle, each under the number of the tensor's place."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: dict[int, torch.Tensor] = {}
        self.seen: list[torch.Tensor] = []  # kept, so that no other tensor gets the number of one of these

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor):
            return None
        if id(value) not in self.tensors:
            self.tensors[id(value)] = copy.deepcopy(value)
            self.seen.append(value)
        return id(value)


class _Unpickler(pickle.Unpickler):
    """Clones each tensor once, so that tied weights stay tied."""

    def __init__(self, file: io.BytesIO, tensors: dict[int, torch.Tensor]) -> None:
        super().__init__(file)
        self.tensors, self.cloned = tensors, {}

    def persistent_load(self, which: int) -> torch.Tensor:
        if which not in self.cloned:
            self.cloned[which] = copy.deepcopy(self.tensors[which])
        return self.cloned[which]
