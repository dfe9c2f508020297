"""Split the tensors of a packed batch into documents, and join what was computed of each document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._types import Call, Function
from ..documents.boundaries import Boundaries
from ..errors import PackingNotIsolated
from .packed_mask import PackedMask


def lengths_of(documents: Boundaries) -> list[int]:
    """Return the lengths of the documents that are not empty, in tokens."""
    return [length for length in documents.lengths if length]


def split(value: Any, shape: Sequence[int], lengths: list[int]) -> Sequence[Any]:
    """Return an argument for each document: tensors with the batch's tokens are split to ``[1, length, ...]``.

    A packed mask becomes None. Other values are the same for every document.

    Args:
        value: the argument for the whole batch.
        shape: ``(batch, length)`` of the batch.
        lengths: the documents' lengths, in tokens.
    """
    if isinstance(value, PackedMask):
        return [None] * len(lengths)
    if isinstance(value, (tuple, list)):
        columns = [split(each, shape, lengths) for each in value]
        return [tuple(column[i] for column in columns) for i in range(len(lengths))]
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[1] != shape[1]:
        return [value] * len(lengths)
    rows = value.expand(shape[0], *value.shape[1:]).flatten(0, 1)
    return [piece[None] for piece in torch.split(rows, lengths)]


def of_each(
    function: Function, args: Sequence[Any], kwargs: Call, shape: Sequence[int], lengths: list[int]
) -> list[Any]:
    """Return a function's output for each document, whose part of the arguments it is given (:func:`split`)."""
    in_order, by_name = split(list(args), shape, lengths), split(list(kwargs.values()), shape, lengths)
    return [function(*given, **dict(zip(kwargs, named))) for given, named in zip(in_order, by_name)]


def join(outputs: Sequence[Any], shape: Sequence[int], lengths: Sequence[int]) -> Any:
    """Join the documents' outputs, ``[1, length, ...]`` to ``[batch, length, ...]``, ``[length, ...]`` end to end.

    If a module returns several outputs, those after the first that are not for each token (a last state) become None.

    Args:
        outputs: a module's output for each document.
        shape: ``(batch, length)`` of the batch.
        lengths: the documents' lengths, in tokens.

    Raises:
        PackingNotIsolated: the first output does not have one entry for each token.
    """
    if isinstance(outputs[0], tuple):
        first, *others = zip(*outputs)
        return (join(first, shape, lengths), *(_of_tokens(other, shape, lengths) for other in others))
    whole = _of_tokens(outputs, shape, lengths)
    if whole is None:
        found = f"{type(outputs[0]).__name__} {list(getattr(outputs[0], 'shape', []))}"
        raise PackingNotIsolated(
            f"a module returned something that is not for each token ({found}): computed document by document, there "
            "is one for each of them. Train this model padded, and please report it."
        )
    return whole


def _of_tokens(outputs: Sequence[Any], shape: Sequence[int], lengths: Sequence[int]) -> torch.Tensor | None:
    shapes = [tuple(each.shape) if isinstance(each, torch.Tensor) else () for each in outputs]
    if [each[:2] for each in shapes] == [(1, length) for length in lengths]:
        whole = torch.cat(tuple(outputs), dim=1)
        return whole.view(*shape, *whole.shape[2:])
    return torch.cat(tuple(outputs)) if [each[:1] for each in shapes] == [(length,) for length in lengths] else None
