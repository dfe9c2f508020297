"""Embeddings that look positions up in a table of their own, along the row (DistilBERT up to 4.57).

Neither the model nor its embeddings take ``position_ids``, so these ride on the embeddings' input to their forward.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch

from ..._types import Function, Model
from ...documents.names import TOKENS
from .. import inspecting, luggage
from ..calls import passed
from ..looked import Looked
from ..site import Site, of_forward
from ..step import Step
from .trait import Trait

_TABLE = "position_ids"


class RowPositions(Trait):
    """Give such embeddings the position ids of a packed batch."""

    name = "row positions"

    def finds(self, model: Looked) -> bool | None:
        return True if along_the_row(model.decoder) and not model.apart else None

    def replaces(self, model: Looked, found: Any) -> Iterable[Site]:
        return [of_forward(module, with_position_ids) for module in along_the_row(model.decoder)]

    def before(self, step: Step, found: Any) -> None:
        if step.mask is not None and step.role.innermost:
            for name in passed(step.call, TOKENS):
                step.attach(name, luggage.Piece(luggage.POSITIONS, step.mask.position_ids))


def along_the_row(decoder: Model) -> list[Any]:
    """The modules of a decoder with a buffer ``position_ids``, which their forward reads and does not take."""
    if _TABLE in inspecting.upstream_parameters(type(decoder).forward):
        return []
    return [
        module
        for _, module in list(decoder.named_modules())[1:]
        if _TABLE in module._buffers
        and inspecting.reads_name(inspecting.forward_of(type(module)), _TABLE)
        and not inspecting.takes(inspecting.forward_of(type(module)), _TABLE)
    ]


class _WithIds:
    """Stands in for the embeddings during one packed call. Its table holds the batch's ids, ``[batch, length]``."""

    def __init__(self, module: torch.nn.Module, position_ids: torch.Tensor) -> None:
        self._module, self.position_ids = module, position_ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def with_position_ids(original: Function) -> Function:
    """Return the replacement for the ``forward`` of such embeddings."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        riding = [luggage.take(value, luggage.POSITIONS) for value in chain(args, kwargs.values())]
        ids = next((each for each in riding if each is not None), None)
        return original(self if ids is None else _WithIds(self, ids), *args, **kwargs)

    return forward
