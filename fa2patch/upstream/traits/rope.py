"""Rope that depends on the sequence length: it must see the document's length, not the row's.

Dynamic NTK scales by the longest sequence seen so far. A packed batch with a document longer than
``max_position_embeddings`` is refused, because Transformers keeps that document's scaling for the sequences after it.
Longrope chooses one of two sets of factors by the length, and is computed document by document. Versions up to 4.47
pass the row's length to some rotary modules as ``seq_len``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from ..._types import Function
from ...errors import UnsupportedModel
from .. import inspecting, luggage
from ..looked import Looked
from ..rope import MODULES, NAME, Found, length_scaled
from ..seams.layer_rotary import each_document
from ..site import Site, of_forward
from ..step import Step
from .trait import Trait


class Rope(Trait):
    """Replace the rotary modules of longrope. Dynamic NTK is checked when a packed batch is recognised."""

    name = NAME

    def finds(self, model: Looked) -> Found | None:
        scaling = length_scaled(model.decoder.config)
        return None if scaling is None else Found(scaling, scaling.kind == "longrope" and bool(_modules(model)))

    def refuses(self, model: Looked, found: Found) -> None:
        for module in _modules(model) if found.rides else ():
            if not inspecting.takes(inspecting.forward_of(type(module)), "position_ids"):  # PhiMoE from 4.46 to 4.57
                raise UnsupportedModel(
                    f"{type(model.decoder).__name__}: expected that {type(module).__name__} takes position_ids, found "
                    "that it takes the row's length only. Rope scaling 'longrope' chooses factors by the length, so "
                    "all documents of a row would get the row's. Use Transformers 5.0 or later, or train padded."
                )

    def replaces(self, model: Looked, found: Found) -> Iterable[Site]:
        return [of_forward(module, by_document) for module in _modules(model)] if found.rides else []

    def before(self, step: Step, found: Found) -> None:
        split = step.mask is not None and step.mask.part is not None  # no document is then longer than the limit
        if found.rides and not split:
            step.send_documents()


def _modules(model: Looked) -> list[torch.nn.Module]:
    return [module for name, module in model.decoder.named_children() if name in MODULES]


def by_document(original: Function) -> Function:
    """Replacement for a rotary module's ``forward(x, position_ids)`` that computes each document by itself."""

    @functools.wraps(original)
    def forward(self: Any, x: torch.Tensor, position_ids: Any = None, **kwargs: Any) -> Any:
        documents = luggage.take(position_ids, luggage.DOCUMENTS)
        if documents is None:
            return original(self, x, position_ids, **kwargs)
        return each_document(functools.partial(original, self), x, position_ids, documents, kwargs)

    return forward
