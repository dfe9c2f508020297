"""Sequence classification: the model's own forward pools each document of a packed batch.

The forward of a ``...ForSequenceClassification`` gets a batch with one row per document. Each row holds only the token
that is pooled. The forward scores, pools and computes the loss as for any other batch. The packed batch travels as
luggage on these tokens to the base model, which computes it and returns the hidden states of the pooled tokens only.

Which token is pooled differs: up to 4.48 the one before the first padding token (in BLOOM, Falcon and MPT of 4.34 the
number of other tokens decides), later the last one that is no padding. If the padding token also stands inside of
documents, these are different tokens. So the forward itself is asked: it is run around a base model that returns the
places of the tokens.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from ..._torch import uncompiled
from ..._types import Call, Function, Model
from ...documents.boundaries import Boundaries
from ...documents.names import TOKENS
from ...errors import BadBatch, PackingNotIsolated
from .. import inspecting, luggage
from ..apart import Documents
from ..calls import passed
from ..packed_mask import PackedMask
from ..step import Step
from .trait import Trait

POOLED = "pooled_logits"
"""The variable that holds the result of pooling in the forwards of all Transformers versions."""

_TRIED = (0.0, 3.0, 1.0, 2.0)
"""Places of a row's tokens for which the mean, the least, the largest and the first are not the last."""


@dataclass(eq=False)
class Pooled:
    """A packed batch that travels as luggage from a pooling head to the base model.

    Attributes:
        whole: ``input_ids`` or ``inputs_embeds`` of the packed batch, under that name.
        tokens: int64 ``[documents]``, the index of each pooled token in the rows laid end to end.
        shape: ``(batch, length)`` of the packed batch.
    """

    whole: dict[str, torch.Tensor]
    tokens: torch.Tensor
    shape: tuple[int, int]

    def pooled(self, output: Any) -> Any:
        """The base model's output with the hidden states of the pooled tokens only, ``[documents, 1, hidden]``.

        Raises:
            PackingNotIsolated: the hidden states do not have the packed batch's shape.
        """
        hidden = output[0]
        if tuple(hidden.shape[:2]) != self.shape:
            raise PackingNotIsolated(
                f"expected hidden states {list(self.shape)} + [hidden] of the base model, found {list(hidden.shape)}: "
                "which of them are documents' last tokens is not known. Train this model padded."
            )
        chosen = hidden.flatten(0, 1)[self.tokens.to(hidden.device)][:, None]
        if isinstance(output, tuple):
            return (chosen, *output[1:])
        output[next(iter(output.keys()))] = chosen
        return output


def pools_documents(model: Model) -> bool:
    """Whether a model's forward pools the last token of each row, so that it can pool each document instead."""
    forward = _pooling_forward(model)
    if forward is None:
        return False
    ids = torch.full((1, len(_TRIED)), (_padding(model) or 0) + 1)
    try:
        found = _pooled(forward, model, ids, torch.tensor([_TRIED]))
    except Exception:  # code that does more than pool; what it then raises can be anything
        return False
    return found.tolist() == [_TRIED[-1]]


def _pooling_forward(model: Model) -> Function | None:
    """The forward in which a model's head pools, below its decorators; None if there is none."""
    forwards = inspecting.forwards_that_run(type(model))
    return next((inspect.unwrap(forward) for forward in forwards if inspecting.has_variable(forward, POOLED)), None)


def _padding(model: Model) -> int | None:
    token: int | None = inspecting.text_config(model.config).pad_token_id
    return token


def _pooled(forward: Function, model: Model, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The places that a head's forward pools, float32 ``[rows]``, from ids and places ``[rows, length]``."""
    pooled: torch.Tensor = forward(_StandIn(model, places[..., None]), input_ids=ids)[0]
    return pooled[:, 0]


class _StandIn:
    """Stands in for a model in the forward of its head: the base model returns each token's place in the row.

    The head's other modules hand on what they are given. Everything else is the model's own.
    """

    def __init__(self, model: Model, places: torch.Tensor) -> None:
        self._model, self._places = model, places

    def __getattr__(self, name: str) -> Any:
        own = getattr(self._model, name)
        return self._called if isinstance(own, torch.nn.Module) else own

    def _called(self, given: Any = None, *args: Any, **kwargs: Any) -> Any:
        is_hidden = isinstance(given, torch.Tensor) and given.is_floating_point()
        return given if is_hidden else _Output((self._places,))


class _Output(tuple[torch.Tensor]):
    """A base model's output, a tuple or an object with attributes, of which only the hidden states are not None."""

    def __getattr__(self, name: str) -> torch.Tensor | None:
        return self[0] if name == "last_hidden_state" else None


class PooledHeads(Trait):
    """Give a pooling head one row of one token per document, with the packed batch as luggage."""

    name = "pooled heads"

    def before(self, step: Step, found: Any) -> None:
        if step.mask is not None and step.places and step.role.pools:
            step.mask.require_whole_rows("a head that pools the last token of each document")
            step.call, piece = by_document(step.module, step.call, step.mask)
            step.pieces.append(piece)


def by_document(model: Model, call: Call, mask: PackedMask) -> tuple[dict[str, Any], luggage.Piece]:
    """Rewrite the call of a pooling head: one row of one token per document.

    Documents of padding are left out.

    Args:
        model: the model with the head.
        call: its arguments by name.
        mask: the packed mask.

    Returns:
        The new arguments, with tokens ``[documents, 1]`` or embeddings ``[documents, 1, hidden]``, and the piece of
        luggage on them.

    Raises:
        BadBatch: there is not one label per document, or there are several documents and the config has no
            ``pad_token_id``.
    """
    name, whole = next(iter(passed(call, TOKENS).items()))
    pad = _padding(model)
    tokens = _pooled_tokens(model, mask, whole, pad if name == "input_ids" else None)
    tokens = _of_real_documents(tokens, mask.boundaries, call.get("attention_mask"))
    if pad is None and len(tokens) > 1:
        raise BadBatch(
            f"{type(model).__name__} has no pad_token_id in its config, and pools no more than one vector without. "
            "Set model.config.pad_token_id to an id that no document ends in."
        )
    ride = luggage.Piece(luggage.POOLED, Pooled({name: whole}, tokens, mask.shape))
    call = {**call, name: luggage.attach(whole.flatten(0, 1)[tokens][:, None], ride)}
    if call.get("labels") is not None:
        call["labels"] = _one_per_document(call["labels"], len(tokens))
    return call, ride


def is_riding(call: Call) -> bool:
    """Whether a packed batch rides on a forward's arguments."""
    return any(luggage.find(call.get(name), luggage.POOLED) is not None for name in TOKENS)


def ridden(call: Call) -> Pooled | None:
    """Take the packed batch that rides on a base model's arguments; None if there is none."""
    rides = (luggage.take(call.get(name), luggage.POOLED) for name in TOKENS)
    return next((ride for ride in rides if ride is not None), None)


@uncompiled
def _pooled_tokens(model: Model, mask: PackedMask, whole: torch.Tensor, pad: int | None) -> torch.Tensor:
    """The index of the token that the head pools in each document, int64 ``[documents]``, in the rows laid end to end.

    The head's forward sees the documents padded. If it pools padding (some do for a document that begins with that
    token), the document's last token takes its place. So it does where there are no ids to look for padding in.
    """
    documents, device = Documents(mask.boundaries, mask.shape), whole.device
    counted = torch.tensor(documents.lengths)
    lengths, ends = counted.to(device), counted.cumsum(0).to(device)
    last = lengths - 1
    forward = _pooling_forward(model)
    if pad is not None and forward is not None:
        places = torch.arange(max(documents.lengths), device=device).expand(len(documents), -1)
        inside = places < lengths[:, None]
        rows = whole.new_full(inside.shape, pad).masked_scatter(inside, documents.end_to_end(whole))
        last = torch.minimum(_pooled(forward, model, rows, places.float()).long(), last)
    tokens = torch.arange(whole.shape[0] * whole.shape[1], device=device).view(mask.shape)
    return documents.end_to_end(tokens)[ends - lengths + last]


def _last_segments(boundaries: Boundaries) -> list[int]:
    """The segment in which each document ends, of those that have tokens."""
    if boundaries.tree is not None:
        return boundaries.tree.leaves
    return [number for number, length in enumerate(boundaries.lengths) if length]


def _of_real_documents(tokens: torch.Tensor, boundaries: Boundaries, given: object) -> torch.Tensor:
    """The pooled tokens without those of documents that a 2-D mask marks as padding."""
    if not isinstance(given, torch.Tensor) or given.dim() != 2:
        return tokens
    starts = torch.tensor([0, *boundaries.lengths])[:-1].cumsum(0)[_last_segments(boundaries)]
    return tokens[given.flatten()[starts.to(given.device)].to(tokens.device) != 0]


def _one_per_document(labels: object, documents: int) -> torch.Tensor:
    found = f"{list(labels.shape)}" if isinstance(labels, torch.Tensor) else type(labels).__name__
    if isinstance(labels, torch.Tensor):
        flat = labels[0] if labels.dim() > 1 and labels.shape[0] == 1 and documents != 1 else labels
        if flat.dim() and len(flat) == documents:
            return flat
    raise BadBatch(
        f"labels: expected one for each of the batch's {documents} documents, [{documents}] or [1, {documents}], or "
        f"[{documents}, num_labels]; found {found}. DataCollatorWithFlattening(document_labels=True) makes them."
    )
