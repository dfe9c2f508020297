"""Positions: the position of a document's first token, and whether position ids reach the position embeddings."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from ..._types import Function, Model
from ...errors import UnsupportedModel
from .. import inspecting
from ..find_models import text_modules
from ..looked import Looked
from ..packed_mask import MASK, PackedMask
from ..site import Site, of_forward
from .row_positions import along_the_row
from .trait import Trait

NAME = "positions"
"""The trait's name, the key of its :class:`Found` in ``Patch.found``."""

_POSITIONS = re.compile(r"(^|_)(position|positions|pos|wpe|rotary|rope)(_|$)")


class Found(NamedTuple):
    """A model's positions.

    Attributes:
        first: the position of a document's first token if a batch has no position ids.
        unreachable: the module or parameter that embeds positions in a model that reads no position ids; empty if
            there is none.
        by_column: whether the model embeds a token's place in the row if a batch has no position ids. In a row that is
            padded left, that is not the token's place in its document.
    """

    first: int
    unreachable: str
    by_column: bool


class Positions(Trait):
    """Make positions restart with each document, and refuse a model in which they cannot."""

    name = NAME

    def finds(self, model: Looked) -> Found:
        counting = model.apart or position_embeddings(model.decoder) or along_the_row(model.decoder)
        first = first_position(model.decoder)
        by_column = not (counting or first) and embeds_positions(model.decoder)
        return Found(first, "" if counting else unreachable_positions(model.decoder), by_column)

    def refuses(self, model: Looked, found: Found) -> None:
        if found.unreachable:
            raise UnsupportedModel(
                f"{type(model.decoder).__name__}.forward reads no position_ids in this version of Transformers, and "
                f"positions are embedded in {found.unreachable}: they would count on from one document into the next. "
                "Nothing was patched. Upgrade Transformers, or train this model "
                "padded."
            )

    def replaces(self, model: Looked, found: Found) -> Iterable[Site]:
        return [of_forward(module, counted_by_position_ids) for module in position_embeddings(model.decoder)]


def first_position(decoder: Model) -> int:
    """The position of a document's first token if a batch has no position ids: 0, but 2 in RoBERTa and its kin."""
    for _, module in text_modules(decoder):
        table = getattr(module, "position_embeddings", None)
        counts = inspecting.reads_name(inspecting.forward_of(type(module)), "padding_idx")  # ERNIE-M's do not
        padding = getattr(table, "padding_idx", None)  # I-BERT's table is no torch.nn.Embedding
        if padding is not None and counts:
            return int(padding) + 1
    return 0


def embeds_positions(decoder: Model) -> bool:
    """Whether a decoder has a table of positions (BERT, GPT-2); rotary positions have none."""
    named = decoder.named_modules()
    return any(
        isinstance(module, torch.nn.Embedding) and _POSITIONS.search(name.rsplit(".", 1)[-1]) for name, module in named
    )


def unreachable_positions(decoder: Model) -> str:
    """The name of what embeds positions in a decoder whose forward reads no position ids; empty if there is none.

    Such a decoder counts positions along the row.
    """
    if _may_read_ids(decoder):
        return ""
    names = [name for name, _ in (*decoder.named_modules(), *decoder.named_parameters())]
    return next((name for name in names if _POSITIONS.search(name.rsplit(".", 1)[-1])), "")


def _may_read_ids(decoder: Model) -> bool:
    """Whether a decoder's forward may read position ids: by name, out of ``**kwargs``, or behind an unreadable wrapper.

    ``**kwargs`` alone is not enough: Bart in 5.x passes them to attention layers, which ignore the ids, and not to its
    embeddings.
    """
    inherited = (forward for _, forward in inspecting.forwards(type(decoder)))
    for forward in (decoder.forward, *inherited):
        if inspecting.code_of(forward) is None or inspecting.takes(forward, "position_ids"):
            return True
        if inspecting.takes_any_keyword(forward):
            if inspecting.has_constant(forward, "position_ids") or inspecting.takes_any_position(forward):
                return True
            if inspecting.reads_name(forward, "forward"):
                continue  # it calls super().forward: the parent class decides
        return False
    return False


def position_embeddings(decoder: Model) -> list[torch.nn.Embedding]:
    """The position embeddings that take the mask and count its ones (OPT, BioGPT)."""
    return [
        module for _, module in text_modules(decoder) if isinstance(module, torch.nn.Embedding) and _counts_mask(module)
    ]


def _counts_mask(embedding: torch.nn.Embedding) -> bool:
    first = inspecting.parameters(embedding.forward)[0]
    behind_args = first.kind is first.VAR_POSITIONAL and hasattr(embedding, "offset")  # a wrapper of other code
    return first.name == MASK or behind_args


def counted_by_position_ids(original: Function) -> Function:
    """Replacement for the ``forward`` of such an embedding: a packed batch's ``position_ids`` are embedded."""

    @functools.wraps(original)
    def forward(self: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(attention_mask, PackedMask):
            return original(self, attention_mask, *args, **kwargs)
        return torch.nn.Embedding.forward(self, attention_mask.position_ids + self.offset)

    return forward
