"""The row of a trial: what a kernel is handed, in documents that are like those of a model.

Random numbers alone are not: activations have channels and tokens that are outliers, and rows of padding or of repeated
tokens have keys that are all equal. The row is handed over twice, with other memory and other places of the documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

# The lengths of the keys, if they are other tokens than the queries: fewer, as many or more; or for causal attention,
# which counts from the last key, no fewer. The documents that are like activations keep theirs.
KEY_LENGTHS = (40, 1, 90, 64, 5, 97, 40, 50, 200)
LONGER_KEYS = (40, 70, 90, 140, 64, 97, 40, 50, 290)

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
    others = LONGER_KEYS if asked.causal else KEY_LENGTHS
    of_keys = others if "pairs" in asked.features else LENGTHS
    tokens, keys = sum(LENGTHS), sum(of_keys)
    sizes = (tokens, asked.heads, asked.head_dim), (keys, asked.key_heads, asked.head_dim)
    q, k, v = (1.5 * torch.randn(size, generator=drawn) for size in (*sizes, (keys, asked.key_heads, asked.value_dim)))
    direction = torch.randn((tokens, asked.heads, asked.value_dim), generator=drawn)
    outliers, constant, _ = _special(LENGTHS)
    key_outliers, key_constant, equal = _special(of_keys)
    k[key_outliers, :, asked.head_dim // 2] += 24  # a channel that is large in all keys
    q[outliers][9::20] *= 8
    k[key_outliers][11::20] *= 6
    v[key_outliers][7::20] *= 16
    direction[outliers][5::20] *= 8
    # multiples of 1/4 are exact in each dtype, and so are their products
    q[constant] = k[key_constant] = round(4 * (LOGIT / (SCALE * asked.head_dim**0.5)) ** 0.5) / 4
    k[equal] = k[equal][:1].clone()
    ends = ends_of(LENGTHS, device)
    parents = torch.tensor(PARENTS).to(ends) if "trees" in asked.features else None
    until = None
    if "spans" in asked.features:
        until = torch.arange(tokens).to(ends)
        for start, stop in SPANS:
            until[start:stop] = stop - 1
    sources = None if keys == tokens else Boundaries(ends_of(of_keys, device), max(of_keys), None, of_keys)
    documents = Boundaries(ends, max(LENGTHS), None, LENGTHS, parents, until=until, sources=sources)
    if asked.dtype == torch.float32:  # as TF32 has them, so that its products are exact
        q, k, v, direction = (x.half() for x in (q, k, v, direction))
    q, k, v, direction = (x.to(device, asked.dtype) for x in (q, k, v, direction))
    return Row((q, k, v), direction, documents)


def _special(lengths: Sequence[int]) -> list[slice]:
    starts = [sum(lengths[:at]) for at in range(len(lengths))]
    return [slice(starts[at], starts[at] + lengths[at]) for at in (OUTLIERS, CONSTANT, EQUAL)]


def options_of(asked: Asked, drawn: torch.Generator, device: torch.device) -> Options:
    values: dict[str, Any] = {"scale": SCALE * asked.head_dim**-0.5, "causal": asked.causal}
    for row in TABLE:
        if row.trial is None:
            continue
        # drawn for each, so that other features do not change the values
        value = row.trial(asked.heads, max(LENGTHS), drawn)
        if row.by_head:  # what is learned has q's dtype, so that each dtype has the same values
            value = value.to(device, asked.dtype if row.learned else None)
        if row.feature in asked.features:
            values[row.name] = value
    return Options(**values)


class Call(NamedTuple):
    row: Row
    options: Options
    # int64 ``[tokens]``, which token of trial_row each one is: of the queries, and of the keys
    order: tuple[torch.Tensor, torch.Tensor]


def calls(row: Row, options: Options, exact: torch.dtype) -> Iterator[Call]:
    documents, device = row.documents, row.direction.device
    q, k, v = row.states
    tokens, keys = (torch.arange(len(x), device=device) for x in (q, k))
    # Rotary embeddings leave q and k with the heads before the tokens, and v is a part of a projection.
    heads_first = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k))
    states = *heads_first, _parts(k, v)[1]
    yield Call(Row(states, _parts(row.direction)[0], documents), options, (tokens, keys))
    # Now all three are parts of one projection, the longest length is an upper bound, what heads learn is in float32,
    # and the documents are in the opposite order unless a tree or spans say where they are.
    bound = replace(documents, max_seqlen=2 * documents.max_seqlen, made={})
    if documents.parents is None and documents.until is None:
        tokens, bound = _reversed(tokens, bound)
        keys = tokens
    if documents.sources is not None:
        sources = replace(documents.sources, max_seqlen=2 * documents.sources.max_seqlen, made={})
        keys, sources = _reversed(torch.arange(len(k), device=device), sources)
        states = *_parts(q[tokens]), *_parts(k[keys], v[keys])
        bound = replace(bound, sources=sources)
    else:
        states = _parts(q[tokens], k[tokens], v[tokens])
    direction = _parts(row.direction[tokens], row.direction[tokens])[1]
    options = options.with_heads(lambda by_head: by_head.to(exact), learned=True)
    yield Call(Row(states, direction, bound), options, (tokens, keys))


def _reversed(tokens: torch.Tensor, documents: Boundaries) -> tuple[torch.Tensor, Boundaries]:
    lengths = documents.lengths[::-1]
    ends = ends_of(lengths, tokens.device)
    order = torch.cat(torch.split(tokens, list(documents.lengths))[::-1])
    return order, replace(documents, cu_seqlens=ends, _lengths=lengths)


def _parts(*states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    # Parts of one tensor ``[tokens, width]``, which has a little more.
    width = [x[0].numel() for x in states]
    whole = torch.cat([*(x.flatten(1) for x in states), states[0].flatten(1)], 1)
    return tuple([part.view(x.shape) for part, x in zip(torch.split(whole, [*width, width[0]], 1), states)])
