"""The row of a trial: what a kernel is handed, in documents that are like those of a model.

Random numbers alone are not: activations have channels and tokens that are outliers, and rows of padding or of repeated
tokens have keys that are all equal. The row is handed over twice, with other memory and other places of the documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..documents.boundaries import Boundaries
from ..documents.tensors import ends_of
from .options import TABLE, Options
from .protocol import Asked

# One token; less than a block of keys; one block; more than a block, and not a multiple of one; then a document with
# outliers, one of constant rows, one of equal keys; and one of several blocks of queries.
LENGTHS = (1, 70, 5, 133, 64, 97, 40, 50, 290)

# The numbers of the documents that are like activations. FlashAttention 4 was wrong only where a value was an outlier
# (TransformerEngine#3216).
OUTLIERS, CONSTANT, EQUAL = 5, 6, 7

# The documents as segments of a tree, if the call has one: roots alone, and roots with one and two levels below.
PARENTS = (-1, -1, 1, 1, 3, 3, -1, 6, -1)

# The spans of the documents, if the call has some, as ``(first token, token behind the last)``: at a document's
# beginning, inside one, two side by side, a whole document, and at a document's end. None is longer than the window.
SPANS = ((1, 10), (30, 39), (39, 46), (71, 76), (200, 209), (264, 273), (290, 299), (372, 381))

# The scale is relative to the usual one, so that a kernel that ignores the argument fails. The values of the other
# options are in their table.
SCALE = 0.7

# The logits of the document of constant rows, about. ``exp`` of it is no number in float32.
LOGIT = 120.0


class Row(NamedTuple):
    states: tuple[torch.Tensor, ...]  # q, k and v ``[tokens, heads, dim]``
    direction: torch.Tensor  # the gradient of the output, ``[tokens, query heads, value dim]``
    documents: Boundaries


def trial_row(asked: Asked, drawn: torch.Generator, device: torch.device) -> Row:
    # The values fit float16.
    tokens, starts = sum(LENGTHS), [sum(LENGTHS[:at]) for at in range(len(LENGTHS))]
    sizes = ((asked.heads, asked.head_dim), (asked.key_heads, asked.head_dim), (asked.key_heads, asked.value_dim))
    q, k, v = (1.5 * torch.randn((tokens, *size), generator=drawn) for size in sizes)
    direction = torch.randn((tokens, asked.heads, asked.value_dim), generator=drawn)
    outliers, constant, equal = (slice(starts[at], starts[at] + LENGTHS[at]) for at in (OUTLIERS, CONSTANT, EQUAL))
    k[outliers, :, asked.head_dim // 2] += 24  # a channel that is large in all keys
    q[outliers][9::20] *= 8
    k[outliers][11::20] *= 6
    v[outliers][7::20] *= 16
    direction[outliers][5::20] *= 8
    # multiples of 1/4 are exact in each dtype, and so are their products
    q[constant] = k[constant] = round(4 * (LOGIT / (SCALE * asked.head_dim**0.5)) ** 0.5) / 4
    k[equal] = k[equal][:1].clone()
    ends = ends_of(LENGTHS, device)
    parents = torch.tensor(PARENTS).to(ends) if "trees" in asked.features else None
    until = None
    if "spans" in asked.features:
        until = torch.arange(tokens).to(ends)
        for start, stop in SPANS:
            until[start:stop] = stop - 1
    documents = Boundaries(ends, max(LENGTHS), None, LENGTHS, parents, until=until)
    if asked.dtype == torch.float32:  # as TF32 has them, so that its products are exact
        q, k, v, direction = (x.half() for x in (q, k, v, direction))
    q, k, v, direction = (x.to(device, asked.dtype) for x in (q, k, v, direction))
    return Row((q, k, v), direction, documents)


def options_of(asked: Asked, drawn: torch.Generator, device: torch.device) -> Options:
    values: dict[str, Any] = {"scale": SCALE * asked.head_dim**-0.5, "causal": asked.causal}
    for row in TABLE:
        if row.trial is None:
            continue
        value = row.trial(asked.heads, drawn)  # drawn for each, so that other features do not change the values
        if row.by_head:  # what is learned has q's dtype, so that each dtype has the same values
            value = value.to(device, asked.dtype if row.learned else None)
        if row.feature in asked.features:
            values[row.name] = value
    return Options(**values)


class Call(NamedTuple):
    row: Row
    options: Options
    order: torch.Tensor  # int64 ``[tokens]``, which token of trial_row each token is


def calls(row: Row, options: Options, exact: torch.dtype) -> Iterator[Call]:
    documents, device = row.documents, row.direction.device
    tokens = torch.arange(row.direction.shape[0], device=device)
    q, k, v = row.states
    # Rotary embeddings leave q and k with the heads before the tokens, and v is a part of a projection.
    heads_first = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k))
    yield Call(Row((*heads_first, _parts(k, v)[1]), _parts(row.direction)[0], documents), options, tokens)
    # Now all three are parts of one projection, the longest length is an upper bound, what heads learn is in float32,
    # and the documents are in the opposite order unless a tree or spans say where they are.
    bound = replace(documents, max_seqlen=2 * documents.max_seqlen, made={})
    if documents.parents is None and documents.until is None:
        tokens = torch.cat(torch.split(tokens, list(documents.lengths))[::-1])
        ends = ends_of(documents.lengths[::-1], device)
        bound = replace(bound, cu_seqlens=ends, _lengths=documents.lengths[::-1])
    states = _parts(q[tokens], k[tokens], v[tokens])
    direction = _parts(row.direction[tokens], row.direction[tokens])[1]
    options = options.with_heads(lambda by_head: by_head.to(exact), learned=True)
    yield Call(Row(states, direction, bound), options, tokens)


def _parts(*states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    # Parts of one tensor ``[tokens, width]``, which has a little more.
    width = [x[0].numel() for x in states]
    whole = torch.cat([*(x.flatten(1) for x in states), states[0].flatten(1)], 1)
    return tuple(part.view(x.shape) for part, x in zip(torch.split(whole, [*width, width[0]], 1), states))
