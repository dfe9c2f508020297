"""Rotary embeddings that look at the sequence's length: they must see the document's, not the row's.

Dynamic NTK scales by the longest length seen: a packed batch is right as long as no document is longer than the length
the model was trained for, and refused beyond it (upstream keeps the scaling of the longest sequence ever seen, so that
a document's result depends on those before it). Longrope chooses one of two sets of factors by the length: computed
document by document. Versions up to 4.47 hand some rotary modules ``seq_len``, the row's length.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, Callable

import torch

from ...documents.boundaries import Boundaries
from .. import luggage

if TYPE_CHECKING:
    from ..packed_mask import PackedMask

NAMES = ("rotary_emb", "maybe_rotary")


def by_document(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replacement for a rotary module's ``forward(x, position_ids)``: each document is embedded by itself."""

    @functools.wraps(original)
    def forward(self: Any, x: torch.Tensor, position_ids: Any = None, **kwargs: Any) -> Any:
        documents = luggage.take(position_ids, luggage.DOCUMENTS)
        if documents is None:
            return original(self, x, position_ids, **kwargs)
        return _each(functools.partial(original, self), x, position_ids, documents, kwargs)

    return forward


class OfLayer:
    """A rotary module that lives in an attention layer (up to 4.47), for one packed call."""

    def __init__(self, module: Any, mask: PackedMask) -> None:
        self._module, self._mask = module, mask

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        mask = self._mask
        names = list(inspect.signature(self._module.forward).parameters)
        if names[:2] == ["query", "key"]:
            return self._of_old_falcon(x, *args, **kwargs)
        call = dict(zip(names[1:], args), **kwargs)
        scaled = mask.rotary
        if scaled is not None and scaled.kind == "longrope":
            position_ids = call.pop("position_ids")
            return _each(self._module, x, position_ids, mask.boundaries, call)
        if call.get("seq_len") is not None:
            call["seq_len"] = mask.positions if scaled is not None else max(mask.positions, call["seq_len"])
        return self._module(x, **call)

    def _of_old_falcon(self, query: Any, key: Any, past_length: int, position_ids: Any) -> Any:
        """4.34 and 4.35: takes the row's length plus the cache's for its table's length, and for the scaling."""
        beyond = self._mask.positions - query.shape[1]
        return self._module(query, key, beyond if self._mask.rotary is not None else max(0, beyond), position_ids)


def _each(
    rotary: Callable[..., Any],
    x: torch.Tensor,
    position_ids: torch.Tensor,
    documents: Boundaries,
    kwargs: dict[str, Any],
) -> Any:
    """cos and sin ``[batch, length, dim]`` of ids ``[batch, length]``, each document as if it were alone."""
    rows, length = position_ids.shape
    kwargs = {name: value for name, value in kwargs.items() if name != "seq_len"}
    documents_ids = torch.split(position_ids.reshape(-1), list(documents.lengths))
    pieces = [rotary(x, position_ids=ids[None], **kwargs) for ids in documents_ids]
    return tuple(torch.cat(part, dim=1).view(rows, length, -1) for part in zip(*pieces))
