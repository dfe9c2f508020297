"""Modules of a base model that embed positions and count them along the row, as those of BART's kin do.

They are given the row's tokens or its shape, and no position ids. So each of them gets documents instead, those of near
length as a batch, and counts in each as in a row of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ...errors import PackingNotIsolated
from ...kernels.grouping import A_CALL, batches
from ..find_models import is_sharded
from ..packed_mask import PackedMask
from ..splitting import Documents


class StackOfRow:
    """Stands in for a base model in one packed forward, with modules that count positions in each document."""

    def __init__(self, module: Any, mask: PackedMask, counting: Iterable[str]) -> None:
        self._module, self._counting = module, tuple(counting)
        for name in self._counting:
            vars(self)[name] = _OfDocuments(getattr(module, name), mask)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def require_counted(self) -> None:
        # A forward that calls its parent's, or another method, reaches the model's own modules.
        missed = [name for name in self._counting if not vars(self)[name].called]
        if missed:
            raise PackingNotIsolated(
                f"{type(self._module).__name__} counts positions in {missed[0]}, along the row, and did not call it "
                "where each document could be counted by itself. Train this model padded, and please report it."
            )


class _OfDocuments:
    def __init__(self, module: Any, mask: PackedMask) -> None:
        self._module, self._mask, self.called = module, mask, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __call__(self, tokens: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        # `tokens` are [batch, length], or such a shape. The result is [batch, length, hidden].
        self.called = True
        # BART's decoder counts positions along the row from 5.0 on, and Pegasus X hands them over without a name
        kwargs.pop("position_ids", None)
        args = tuple([None if isinstance(each, torch.Tensor) else each for each in args])
        documents = Documents(self._mask.boundaries, self._mask.shape)
        # The backward of each call fills a gradient of the whole table, which takes as long as so many tokens.
        table = max((len(weight) for weight in self._module.parameters()), default=A_CALL)
        lengths = tuple(documents.lengths)
        if is_sharded(self._module):  # ranks gather its table in each call, and must make as many
            shared = [[*range(len(lengths))]]
        else:
            shared = batches(lengths, sum(lengths) + table, a_call=table)
        documents = documents.in_batches(shared, self._mask.boundaries.cu_seqlens.device)
        calls = documents.calls.shapes
        pieces: Sequence[Any] = [torch.Size(call) for call in calls]
        if isinstance(tokens, torch.Tensor):
            pieces = documents.split(tokens)
        elif not isinstance(tokens, tuple):  # BART of 5.8 hands over Python's own `input`, beside position ids
            pieces = [torch.empty(call, device=self._mask.boundaries.cu_seqlens.device) for call in calls]
        outputs = []
        for piece, (count, longest) in zip(pieces, calls):
            found = self._module(piece, *args, **kwargs)  # [count, longest, hidden], or without the first
            outputs.append(found.reshape(-1, longest, found.shape[-1]).expand(count, -1, -1))
        joined: torch.Tensor = documents.join(outputs)
        return joined
