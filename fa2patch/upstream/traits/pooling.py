"""Sequence classification: the model's own forward pools each document of a packed batch.

The forward of a ``...ForSequenceClassification`` gets a batch with one row per document. Each row holds only the token
that is pooled. The forward scores, pools and computes the loss as for any other batch. The packed batch travels as
luggage on these tokens to the base model, which computes it and returns the hidden states of the pooled tokens only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..._types import Call, Model
from ...documents.boundaries import Boundaries
from ...documents.names import TOKENS
from ...errors import BadBatch, PackingNotIsolated
from .. import inspecting, luggage
from ..calls import passed
from ..packed_mask import PackedMask
from ..step import Step
from .trait import Trait

POOLED = "pooled_logits"
"""The variable that holds the result of pooling in the forwards of all Transformers versions."""

_LAST_TOKEN = {"sequence_lengths", "sequence_length", "last_non_pad_token"}
"""Variables that hold the pooled token's index in the forwards of all Transformers versions."""


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
    for forward in inspecting.forwards_that_run(type(model)):
        if inspecting.has_variable(forward, POOLED):
            return any(inspecting.has_variable(forward, name) for name in _LAST_TOKEN)
    return False


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
    pad = inspecting.text_config(model.config).pad_token_id
    tokens = _pooled_tokens(mask.boundaries, whole, pad if name == "input_ids" else None)
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


def _pooled_tokens(boundaries: Boundaries, ids: torch.Tensor, pad: int | None) -> torch.Tensor:
    """The index of each document's last token that is not ``pad``, as in Transformers since 4.50.

    In a tree it is looked for in the leaf, which has a token of its own.
    """
    lengths = torch.tensor(boundaries.lengths)
    ends = lengths.cumsum(0).to(ids.device)
    lengths = lengths.to(ids.device)
    of_documents = torch.tensor(_last_segments(boundaries), device=ids.device)
    if pad is None:
        return (ends - 1)[of_documents]
    tokens = ids.numel()
    document = torch.repeat_interleave(torch.arange(len(lengths), device=ids.device), lengths, output_size=tokens)
    at = torch.arange(tokens, device=ids.device)
    at = torch.where(ids.flatten() != pad, at, (ends - lengths)[document])
    return torch.zeros_like(ends).scatter_reduce(0, document, at, "amax")[of_documents]


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
