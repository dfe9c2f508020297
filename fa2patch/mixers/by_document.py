"""A mixer (Mamba, gated delta net, short convolution, ...) runs on each document by itself.

Its state and its convolution then start anew at every boundary, forward and backward, whatever the mixer is and
whichever kernels it calls. What is not handed from token to token (norms, projections around it, experts) still sees
the whole row.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from itertools import chain
from typing import Any, Callable

import torch

from .._compile import uncompiled
from ..errors import PackedWithCache
from ..seams.packed_mask import PackedMask, find

MASKS = ("attention_mask", "mask", "conv_mask")
"""What a mixer's mask is called: the way on which it is handed the boundaries."""

_CACHES = ("past_key_values", "past_key_value", "cache_params")
_OF_THE_ROW = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""What describes the row's documents has no meaning in a document's own call."""


def is_handed_a_mask(forward: Callable[..., Any]) -> bool:
    """Whether a mixer's ``forward`` takes a mask."""
    return any(name in MASKS for name in inspect.signature(forward).parameters)


def by_document(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replacement for a mixer class's ``forward``: a packed batch is computed document by document."""
    names = list(inspect.signature(original).parameters)[1:]

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        mask = find(chain(args, kwargs.values()))
        if mask is None:
            return original(self, *args, **kwargs)
        call = {**dict(zip(names, args)), **kwargs}
        held = [name for name in _CACHES if call.get(name) is not None]
        if held:
            raise PackedWithCache(
                f"{type(self).__name__} was handed {held[0]} with a packed batch. What a cache holds belongs to no one "
                "document of the row. Leave it out (use_cache=False)."
            )
        mask.given(self)
        return _one_by_one(original, self, call, mask)

    return forward


@uncompiled
def _one_by_one(original: Callable[..., Any], module: Any, call: dict[str, Any], mask: PackedMask) -> Any:
    lengths = [length for length in mask.boundaries.lengths if length]
    given = {name: value for name, value in call.items() if name not in _OF_THE_ROW}
    pieces = {name: _of_each(value, mask.shape, lengths) for name, value in given.items()}
    outputs = [original(module, **{name: of[i] for name, of in pieces.items()}) for i in range(len(lengths))]
    return _joined(outputs, mask.shape, lengths)


def _of_each(value: Any, shape: tuple[int, int], lengths: list[int]) -> Sequence[Any]:
    """What has the batch's tokens in it, document by document ``[1, length, ...]``; the rest is for each the same."""
    if isinstance(value, PackedMask):
        return [None] * len(lengths)
    if isinstance(value, (tuple, list)):
        columns = [_of_each(each, shape, lengths) for each in value]
        return [tuple(column[i] for column in columns) for i in range(len(lengths))]
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[1] != shape[1]:
        return [value] * len(lengths)
    rows = value.expand(shape[0], *value.shape[1:]).flatten(0, 1)
    return [piece[None] for piece in rows.split(lengths)]


def _joined(outputs: Sequence[Any], shape: tuple[int, int], lengths: Sequence[int]) -> Any:
    """Outputs ``[1, length, ...]`` of every document as those of the batch; of others (a last state) the first."""
    first = outputs[0]
    if isinstance(first, tuple):
        return tuple(_joined(column, shape, lengths) for column in zip(*outputs))
    tokens = [each.shape[:2] for each in outputs if isinstance(each, torch.Tensor) and each.dim() > 1]
    if tokens != [(1, length) for length in lengths]:
        return first
    whole = torch.cat(tuple(outputs), dim=1)
    return whole.view(*shape, *whole.shape[2:])
