"""Documents of near length share one call as a batch, because every call has a cost of its own.

A batch ``[documents, longest, ...]`` is padded with zeros on the right, and what is computed of them is dropped. Mixers
(``upstream/seams/mixer.py``) and the formula of attention follow the same rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from operator import add
from typing import Any

import numpy as np
import torch

from ..documents.boundaries import Boundaries, document_of
from ..documents.tensors import to_device

# The padded tokens that a batch may hold in any case: about the cost of a call. On a CPU, a call of a mixer takes as
# long as 50 to 300 tokens. Chunked mixers fill every document up to 64 tokens inside anyway.
A_CALL = 64

# The further padded tokens that a batch may hold, as a share of its real tokens. The time of a sequential scan depends
# on its positions, so a batch takes as long as its longest document. Other mixers compute the padding, too.
SHARE = 1 / 8

# The scores of one head in a call of attention, at most. A call with more takes so long that its own cost is small.
SCORES = 2**18

# The numbers of queries that are moved in the time of a call of attention, forward and backward (a CPU's core).
# Documents that do not follow each other in the row must be moved to share a call, and that is a cost of two calls
# more. ``python -m compat_matrix.bench --parts kernels`` compares the choice with other ways.
MOVED = 2**14


@lru_cache(maxsize=8)
def batches(
    lengths: tuple[int, ...], most: int, power: int = 1, pads: bool = True, a_call: int = A_CALL
) -> list[list[int]]:
    # Lengths alone decide, so that a recomputed forward makes the same batches. From the longest document to the
    # shortest, a batch ends where the next one would need more padding than `a_call` and SHARE allow. Its size, their
    # number times ``longest ** power``, is at most ``most``: tokens for a power of 1, scores for 2.
    if lengths and min(lengths) == max(lengths):  # thousands of short ones: no Python for each of them
        size = max(1, most // max(1, lengths[0]) ** power)
        return [[*range(at, min(at + size, len(lengths)))] for at in range(0, len(lengths), size)]
    made: list[list[int]] = []
    longest = real = 0
    for at in sorted(range(len(lengths)), key=lambda at: -lengths[at]):
        count, tokens = len(made[-1]) + 1 if made else 1, real + lengths[at]
        allowed = a_call + SHARE * tokens if pads else 0
        if made and count * longest - tokens <= allowed and count * longest**power <= most:
            made[-1].append(at)
            real = tokens
        else:
            made.append([at])
            longest = real = lengths[at]
    # Each batch has its longest document first. Batches are in the order of the row.
    return sorted(made, key=min)


class Batches:
    """Documents in the calls that compute them."""

    def __init__(
        self, lengths: Sequence[int], batches: Sequence[Sequence[int]] | None = None, device: torch.device | None = None
    ) -> None:
        self.lengths, self.batches = lengths, [*zip(range(len(lengths)))] if batches is None else batches
        self.shapes: list[tuple[int, int]] = []  # of each call: the number of documents, the longest's length
        self.sizes: list[int] = []  # the tokens of each call, with padding
        for batch in self.batches:  # one loop: every packed batch makes one, and a comprehension is a call
            longest = max(map(lengths.__getitem__, batch))
            self.shapes.append((len(batch), longest))
            self.sizes.append(len(batch) * longest)
        self.size = sum(self.sizes)
        # Each token's place in the calls end to end, int64 ``[tokens]``. It is None if that is its own.
        self.places: torch.Tensor | None = None
        order = [*chain.from_iterable(self.batches)]
        if self.size > sum(lengths) or order != [*range(len(lengths))]:
            own, starts = np.array(lengths), np.empty(len(order), np.int64)
            filled = np.repeat([longest for _, longest in self.shapes], [count for count, _ in self.shapes])
            starts[order] = filled.cumsum() - filled
            places = np.arange(own.sum()) + np.repeat(starts - (own.cumsum() - own), own)
            of_tokens = torch.from_numpy(places)
            self.places = of_tokens if device is None else to_device(of_tokens, device)

    def split(self, states: torch.Tensor, filling: torch.Tensor | None = None) -> list[torch.Tensor]:
        # ``[tokens, ...]`` becomes ``[count, longest, ...]`` for each call. Padding gets the values of ``filling``
        # ``[size, ...]``, or zeros.
        if self.places is not None:
            if filling is None:
                states = _put(states, self.places, self.size)
            else:
                states = filling.index_copy(0, self.places, states)
        if len(self.shapes) == 1:  # the backward of a split would copy
            return [states.view(*self.shapes[0], *states.shape[1:])]
        pieces = states[None].split_with_sizes(self.sizes, 1)  # one document needs no other shape
        return [
            piece if call[0] == 1 else piece.view(*call, *states.shape[1:]) for piece, call in zip(pieces, self.shapes)
        ]

    def join(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        if len(pieces) == 1:
            whole = pieces[0].flatten(0, 1)
        else:
            flat = [piece if piece.shape[0] == 1 else piece.flatten(0, 1)[None] for piece in pieces]
            whole = torch.cat(flat, 1).squeeze(0)  # the backward of an index would copy
        if self.places is None:
            return whole
        return _Taken.apply(whole, self.places)  # type: ignore[no-untyped-call,no-any-return]


def _put(states: torch.Tensor, places: torch.Tensor, size: int) -> torch.Tensor:
    # No place occurs twice.
    made = states.new_empty if size == len(places) else states.new_zeros
    return made(size, *states.shape[1:]).index_copy_(0, places, states)


class _Taken(torch.autograd.Function):
    # No place occurs twice, so the backward copies and need not add, which is slow on a CPU.

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.places, ctx.length = places, states.shape[0]
        return states.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _put(grad, ctx.places, ctx.length), None


def shared_calls(boundaries: Boundaries, width: int, causal: bool) -> tuple[Batches, Sequence[torch.Tensor | None]]:
    # The calls are made once in a forward. For each there is the index of the last key that each query sees, int64
    # ``[documents, length]``, or None if the options say it. ``width`` is the number of query heads times the head
    # dimension.
    kind, tree = (shared_calls, width, causal), boundaries.tree
    if kind not in boundaries.made and tree is not None:
        boundaries.made[kind] = Batches(tree.lengths), [None] * len(tree.lengths)
    elif kind not in boundaries.made:
        # Lengths are read on the host. Empty documents are left out.
        lengths, device = tuple(filter(None, boundaries.lengths)), boundaries.cu_seqlens.device
        shared = batches(lengths, SCORES, power=2)
        calls = Batches(lengths, shared if _saves(shared, lengths, width, causal) else None, device)
        # Without causality, padding must be masked.
        plain = causal and boundaries.until is None
        boundaries.made[kind] = calls, [None] * len(calls.shapes) if plain else _last_keys(calls, boundaries, causal)
    found: tuple[Batches, Sequence[torch.Tensor | None]] = boundaries.made[kind]
    return found


def calls_of_pairs(
    targets: Boundaries, sources: Boundaries, causal: bool
) -> tuple[Batches, Batches, Sequence[torch.Tensor | None]]:
    # The calls of the queries and of the keys, made once in a forward, and the last key that each query sees.
    kind = calls_of_pairs, causal
    if kind not in targets.made:
        targets.made[kind] = _pairs(targets, sources, causal)
    found: tuple[Batches, Batches, Sequence[torch.Tensor | None]] = targets.made[kind]
    return found


def _pairs(
    targets: Boundaries, sources: Boundaries, causal: bool
) -> tuple[Batches, Batches, list[torch.Tensor | None]]:
    # From the longest source to the shortest, pairs share a call as long as both sides need little padding. Queries see
    # all keys of their source, so it is only padding that is hidden. With `causal`, which counts from the last key,
    # pairs of the same lengths share a call.
    of_queries, of_keys = targets.lengths, sources.lengths
    made: list[list[int]] = []
    most_of, tokens = [0, 0], [0, 0]  # of the last call's queries and keys: the longest, and all
    for at in sorted(range(len(of_queries)), key=lambda at: (-of_keys[at], -of_queries[at])):
        own = [of_queries[at], of_keys[at]]
        both = [*map(max, most_of, own)], [*map(add, tokens, own)]
        shares = _are_near(len(made[-1]) + 1, *both) if made else False
        if shares and (not causal or own == most_of):
            made[-1].append(at)
            most_of, tokens = both
        else:
            made.append([at])
            most_of = tokens = own
    device = targets.cu_seqlens.device
    queries, keys = Batches(of_queries, made, device), Batches(of_keys, made, device)
    last: list[torch.Tensor | None] = []
    for batch, (_, longest), (_, most) in zip(made, keys.shapes, queries.shapes):
        padded = any(of_keys[at] < longest for at in batch)
        ends = torch.tensor([of_keys[at] - 1 for at in batch])[:, None].expand(-1, most)
        last.append(to_device(ends, device) if padded else None)
    return queries, keys, last


def _are_near(count: int, longest: Sequence[int], tokens: Sequence[int]) -> bool:
    if count * longest[0] * longest[1] > SCORES:
        return False
    return all(count * most - real <= A_CALL + SHARE * real for most, real in zip(longest, tokens))


def _saves(shared: list[list[int]], lengths: Sequence[int], width: int, causal: bool) -> bool:
    # The calls that are saved, less one for each mask and two for the moves, must outweigh the moving of all queries.
    order: list[int] = []
    padded = 0
    for batch in shared:
        order += batch
        padded += lengths[batch[0]] > lengths[batch[-1]]
    if not padded and order == [*range(len(lengths))]:
        return True  # none is moved
    return (len(lengths) - len(shared) - (0 if causal else padded) - 2) * MOVED >= width * sum(lengths)


def _last_keys(calls: Batches, boundaries: Boundaries, causal: bool) -> list[torch.Tensor | None]:
    # Padding sees itself, because a window may hide all before it.
    cu, until, device = boundaries.cu_seqlens, boundaries.until, boundaries.cu_seqlens.device
    if causal and until is not None:
        pieces = calls.split((until - cu[document_of(cu, len(until))]).long())
        return [torch.maximum(piece, torch.arange(piece.shape[1], device=device)) for piece in pieces]
    found: list[torch.Tensor | None] = []
    for batch, (_, longest) in zip(calls.batches, calls.shapes):
        if calls.lengths[batch[-1]] == longest:
            found.append(None)
        else:
            ends = torch.tensor([calls.lengths[at] - 1 for at in batch])[:, None]
            found.append(to_device(torch.maximum(ends, torch.arange(longest)), device))
    return found
