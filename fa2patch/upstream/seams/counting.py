"""Modules of a base model that embed positions and count them along the row, as those of BART's kin do.

They are given the row's tokens or its shape, and no position ids. So each of them gets documents instead, those of near
length as a batch, and counts in each as in a row of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..packed_mask import PackedMask
from ..splitting import Documents


class StackOfRow:
    """Stands in for a base model in one packed forward, with modules that count positions in each document."""

    def __init__(self, module: Any, mask: PackedMask, counting: Iterable[str]) -> None:
        self._module = module
        for name in counting:
            vars(self)[name] = _OfDocuments(getattr(module, name), mask)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _OfDocuments:
    def __init__(self, module: Any, mask: PackedMask) -> None:
        self._module, self._mask = module, mask

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __call__(self, tokens: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        # `tokens` are [batch, length], or such a shape. The result is [batch, length, hidden].
        kwargs.pop("position_ids", None)  # BART's decoder counts them along the row from 5.0 on
        documents = Documents(self._mask.boundaries, self._mask.shape)
        calls = documents.calls.shapes
        pieces = documents.split(tokens) if isinstance(tokens, torch.Tensor) else [torch.Size(call) for call in calls]
        outputs = []
        for piece, (count, longest) in zip(pieces, calls):
            found = self._module(piece, *args, **kwargs)  # [count, longest, hidden], or without the first
            outputs.append(found.reshape(-1, longest, found.shape[-1]).expand(count, -1, -1))
        joined: torch.Tensor = documents.join(outputs)
        return joined
