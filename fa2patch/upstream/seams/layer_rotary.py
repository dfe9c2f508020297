"""Rotary modules inside attention layers (up to 4.47), which are given the length of the row."""

from __future__ import annotations

from typing import Any

import torch

from ..._types import Call, Function
from ...documents.boundaries import Boundaries
from .. import inspecting
from ..packed_mask import PackedMask
from ..splitting import Documents


class OfLayer:
    """Stands in for a layer's rotary module during one packed call, and corrects the length that it is given."""

    def __init__(self, module: Any, mask: PackedMask) -> None:
        self._module, self._mask = module, mask

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        mask = self._mask
        names = inspecting.parameter_names(self._module.forward)
        if names[:2] == ["query", "key"]:
            return self._of_old_falcon(x, *args, **kwargs)
        call = dict(zip(names[1:], args), **kwargs)
        scaled = mask.facts.rope
        if scaled is not None and scaled.kind == "longrope":
            position_ids = call.pop("position_ids")
            return each_document(self._module, x, position_ids, mask.boundaries, call)
        if call.get("seq_len") is not None:
            call["seq_len"] = mask.positions if scaled is not None else max(mask.positions, call["seq_len"])
        return self._module(x, **call)

    def _of_old_falcon(self, query: Any, key: Any, past_length: int, position_ids: Any) -> Any:
        """Call Falcon's module of 4.34 and 4.35. It sizes and scales its table by the row's plus the cache's length."""
        beyond = self._mask.positions - query.shape[1]
        return self._module(query, key, beyond if self._mask.facts.rope is not None else max(0, beyond), position_ids)


def each_document(
    rotary: Function,
    x: torch.Tensor,
    position_ids: torch.Tensor,
    documents: Boundaries,
    kwargs: Call,
) -> Any:
    """Return cos and sin ``[batch, length, dim]``, computed for each document separately.

    Args:
        rotary: the rotary module or its forward.
        x: a tensor that gives ``rotary`` its device and dtype.
        position_ids: ``[batch, length]``.
        documents: the batch's boundaries.
        kwargs: further keywords for ``rotary``. ``seq_len`` is dropped.
    """
    kwargs = {name: value for name, value in kwargs.items() if name != "seq_len"}
    each = Documents(documents, position_ids.shape)
    return each.join([rotary(x, position_ids=ids, **kwargs) for ids in each.split(position_ids)])
