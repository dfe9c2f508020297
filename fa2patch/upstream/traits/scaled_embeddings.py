"""Embeddings that are scaled by the number of mask tokens in a row (ESM): documents are scaled one by one."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from ..._torch import uncompiled
from ..._types import Call, Function, Model
from ...documents.boundaries import Boundaries
from .. import apart, inspecting, luggage
from ..find_models import text_modules
from ..looked import Looked
from ..packed_mask import find
from ..site import Site, of_forward
from ..step import Step
from .trait import Trait


class ScaledEmbeddings(Trait):
    """Replace the forward of embeddings with token dropout. The documents reach it as luggage on ``position_ids``."""

    name = "scaled embeddings"

    def finds(self, model: Looked) -> bool | None:
        return True if _scaled(model.decoder) and not model.apart else None

    def replaces(self, model: Looked, found: Any) -> Iterable[Site]:
        return [of_forward(module, by_document) for module in _scaled(model.decoder)]

    def before(self, step: Step, found: Any) -> None:
        if step.mask is not None:
            step.mask.require_whole_rows("embeddings that are scaled by the mask tokens of a document")
        step.send_documents()


def _scaled(decoder: Model) -> list[torch.nn.Module]:
    return [module for _, module in text_modules(decoder) if "token_dropout" in vars(module)]


def by_document(original: Function) -> Function:
    """Replacement for the ``forward`` of such embeddings: each document is scaled by its own mask tokens.

    Some versions pass them no mask. There the documents come as luggage on ``position_ids``.
    """
    names = inspecting.parameter_names(original)[1:]

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = {**dict(zip(names, args)), **kwargs}
        mask = find(call.values())
        riding = luggage.take(call.get("position_ids"), luggage.DOCUMENTS)
        documents = mask.boundaries if mask is not None else riding
        if documents is None:
            return original(self, *args, **kwargs)
        if "attention_mask" in names:  # versions up to 4.53 require it
            call["attention_mask"] = torch.ones_like(call["position_ids"])
        if call.get("inputs_embeds") is None:  # a single lookup, so that hooks on the table see the whole row
            call["inputs_embeds"] = self.word_embeddings(call["input_ids"])
        return _each(functools.partial(original, self), call, documents)

    return forward


@uncompiled
def _each(embed: Function, call: Call, documents: Boundaries) -> Any:
    """Embeddings ``[batch, length, hidden]``, computed document by document."""
    each = apart.Documents(documents, call["position_ids"].shape)
    return each.join(each.of_each(embed, (), call))
