"""Documents of equal or near length share one call of the formula, because every call has a fixed cost.

A call computes a batch ``[documents, longest, ...]`` of separate documents. A shorter document is continued to the
length of the longest by its own last token, repeated. No real token sees these copies, which is exact for causal
attention; otherwise they are masked. What they compute is dropped, and they receive no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..documents.starts import document_of

if TYPE_CHECKING:
    from ..documents.boundaries import Boundaries

Numbers = NDArray[np.int64]

TOKEN, SCORE, MOVE, MASK = 1e-4, 1.3e-6, 6e-5, 1
"""The cost of a token, of a score, of a token that is moved, and of a mask, in calls. The first three are for each
dimension of each query head.

Measured with torch 2.13 on one core of an AMD EPYC: a call takes 120 microseconds, forward and backward, with 8 heads
of 64 dimensions. ``python -m compat_matrix.bench --parts kernels`` shows what the choice costs beside others.
"""

MOVING = 2
"""The cost of moving tokens at all, in calls, whatever their number.

Measured likewise, forward only: documents of 9 and 7 tokens take 215 microseconds in one call, and 130 in two.
"""

MARGIN = 0.05
"""Tokens are moved to share calls only if this part of the cost is saved, as the numbers above are no exact ones."""

SCORES_AT_ONCE = 2**18
"""Scores of one head in a call. A call with more of them takes so long that its fixed cost does not count."""


class Group(NamedTuple):
    """The documents of one call.

    Attributes:
        documents: their number.
        length: the length of the longest, in tokens, to which the others are continued.
        lengths: their lengths, int64 ``[documents]`` on the host; None if all are equal.
    """

    documents: int
    length: int
    lengths: Numbers | None


class Plan(NamedTuple):
    """How the documents of a batch are computed.

    Attributes:
        groups: the calls.
        order: the tokens of all calls end to end, int64; None if these are the batch's tokens in order.
        places: for each token of the batch its place in ``order``, int64; None likewise.
    """

    groups: tuple[Group, ...]
    order: Numbers | None = None
    places: Numbers | None = None


@lru_cache(maxsize=8)
def plan(lengths: tuple[int, ...], width: int, causal: bool) -> Plan:
    """Choose which documents share a call.

    Args:
        lengths: the documents' lengths in tokens. Empty documents are left out.
        width: the number of query heads times the head dimension.
        causal: whether a query sees no later key. Otherwise, documents of different lengths need a mask.
    """
    real = np.array([length for length in lengths if length], dtype=np.int64)
    alone = Plan(tuple(Group(1, length, None) for length in real.tolist()))
    if len(real) < 2:
        return alone
    longest = _longest(real, width, causal)
    groups, order, places = _laid_out(real, longest)
    tokens = len(places)
    if len(order) == tokens and np.array_equal(order, np.arange(tokens)):
        return Plan(groups)
    masks = 0 if causal else MASK * sum(group.lengths is not None for group in groups)
    together = len(groups) + masks + _cost(longest, width).sum() + MOVING + width * MOVE * tokens
    saves = together < (1 - MARGIN) * (len(real) + _cost(real, width).sum())
    return Plan(groups, order, places) if saves else alone


def _cost(lengths: Numbers, width: int) -> NDArray[np.float64]:
    """The cost of a document of each length without the call's own, in calls."""
    return width * (TOKEN * lengths + SCORE * lengths.astype(np.float64) ** 2)


def _longest(lengths: Numbers, width: int, causal: bool) -> Numbers:
    """For each document the length of the longest in its group, so that all calls together cost least.

    Documents sorted by length are cut into groups by dynamic programming over the different lengths. Documents that are
    too long to share a call with one of their length are left alone.
    """
    different, numbers, counts = np.unique(lengths, return_inverse=True, return_counts=True)
    few = int(np.searchsorted(different**2, SCORES_AT_ONCE / 2, side="right"))
    before = np.concatenate([[0], counts[:few].cumsum()])
    costs = _cost(different[:few], width)
    best, cut = np.zeros(few + 1), np.zeros(few + 1, dtype=np.int64)
    for end in range(1, few + 1):  # one group from each possible beginning to `end`, and the best before it
        calls = np.where(causal | (np.arange(end) == end - 1), 1, 1 + MASK)
        total = best[:end] + calls + (before[end] - before[:end]) * costs[end - 1]
        cut[end] = total.argmin()
        best[end] = total[cut[end]]
    longest, end = different.copy(), few
    while end:
        longest[cut[end] : end] = different[end - 1]
        end = int(cut[end])
    found: Numbers = longest[numbers.reshape(-1)]
    return found


def _laid_out(lengths: Numbers, longest: Numbers) -> tuple[tuple[Group, ...], Numbers, Numbers]:
    """The groups, the tokens of all calls, and each token's place among them; calls are in the order of the row."""
    starts = lengths.cumsum() - lengths
    calls: list[tuple[int, Numbers]] = []
    for length in np.unique(longest).tolist():
        members = np.flatnonzero(longest == length)
        at_once = max(1, SCORES_AT_ONCE // length**2)
        calls += [(length, members[at : at + at_once]) for at in range(0, len(members), at_once)]
    calls.sort(key=lambda call: int(call[1][0]))
    groups, order, base, at = [], [], np.empty_like(starts), 0
    for length, members in calls:
        own = lengths[members]
        inside = np.minimum(np.arange(length), own[:, None] - 1)
        order.append((starts[members, None] + inside).ravel())
        base[members] = at + length * np.arange(len(members))
        at += length * len(members)
        groups.append(Group(len(members), length, None if (own == length).all() else own))
    places = np.repeat(base - starts, lengths) + np.arange(int(lengths.sum()))
    return tuple(groups), np.concatenate(order), places


class Documents(NamedTuple):
    """The documents of a batch in the calls that compute them, with their tensors on the batch's device.

    Attributes:
        groups: the calls.
        order, places: as in :class:`Plan`, as tensors.
        last: the index of the last key that each query sees, int64 ``[documents, length]``, for each call whose
            documents are not causal up to their ends; None for the others.
    """

    groups: tuple[Group, ...]
    order: torch.Tensor | None
    places: torch.Tensor | None
    last: tuple[torch.Tensor | None, ...]

    def queries(self, states: torch.Tensor) -> Sequence[torch.Tensor]:
        """Split states ``[tokens, ...]`` into those of each call, ``[documents, length, ...]``."""
        if self.order is not None:
            states = _Laid.apply(states, self.order, self.places)  # type: ignore[no-untyped-call]
        return self._split(states)

    def keys(self, states: torch.Tensor) -> Sequence[torch.Tensor]:
        """The same as :meth:`queries`: a document's queries see its own keys."""
        return self.queries(states)

    def joined(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join the calls' results ``[documents, length, ...]`` to ``[tokens, ...]`` in the order of the batch."""
        flat = [piece if len(piece) == 1 else piece.flatten(0, 1)[None] for piece in pieces]
        whole = (flat[0] if len(flat) == 1 else torch.cat(flat, 1))[0]
        if self.places is not None:
            whole = _Taken.apply(whole, self.places)  # type: ignore[no-untyped-call]
        return whole

    def gradients(self, grad: torch.Tensor) -> Sequence[torch.Tensor]:
        """The gradients of what :meth:`joined` joins, from that of its result."""
        return self._split(grad if self.places is None else _put(grad, self.places, self._size()))

    def summed(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """The gradient of the states that :meth:`keys` splits, from those of the calls."""
        return self.joined(pieces)

    def _split(self, states: torch.Tensor) -> Sequence[torch.Tensor]:
        sizes = [group.documents * group.length for group in self.groups]
        pieces = states[None].split_with_sizes(sizes, 1)  # most calls have one document, and need no other shape
        return [
            piece if group.documents == 1 else piece.view(*group[:2], *piece.shape[2:])
            for piece, group in zip(pieces, self.groups)
        ]

    def _size(self) -> int:
        return sum(group.documents * group.length for group in self.groups)


def documents_of(boundaries: Boundaries, width: int, causal: bool) -> Documents:
    """The documents of a batch in their calls (see :func:`plan`). Their lengths are read on the host.

    They are made once for each ``width`` and ``causal``, which says whether a query sees no later key; spans excepted.
    """
    kind = ("documents", width, causal)
    if kind not in boundaries.made:
        device = boundaries.cu_seqlens.device
        groups, order, places = plan(boundaries.lengths, width, causal)
        tokens = [None if numbers is None else torch.from_numpy(numbers).to(device) for numbers in (order, places)]
        made = Documents(groups, tokens[0], tokens[1], (None,) * len(groups))
        boundaries.made[kind] = made._replace(last=_last_keys(made, boundaries, causal))
    found: Documents = boundaries.made[kind]
    return found


def _last_keys(documents: Documents, boundaries: Boundaries, causal: bool) -> tuple[torch.Tensor | None, ...]:
    """The index of the last key that each query sees. A copy sees as far as itself: a window may hide all before it."""
    cu, until = boundaries.cu_seqlens, boundaries.until
    if causal and until is not None:
        starts = cu[document_of(cu, len(until))]
        pieces = documents.queries((until - starts).long())
        return tuple(torch.maximum(piece, torch.arange(piece.shape[1], device=cu.device)) for piece in pieces)
    if causal:
        return documents.last
    lengths = [group.lengths for group in documents.groups]
    ends = [
        None if own is None else np.maximum(own[:, None] - 1, np.arange(group.length))
        for own, group in zip(lengths, documents.groups)
    ]
    return tuple(None if end is None else torch.from_numpy(end).to(cu.device) for end in ends)


def _put(values: torch.Tensor, places: torch.Tensor, size: int) -> torch.Tensor:
    """Zeros ``[size, ...]`` with values at some places."""
    return values.new_zeros(size, *values.shape[1:]).index_copy(0, places, values)


class _Laid(torch.autograd.Function):
    """``states[order]``. The copies at a document's end receive no gradient, so the backward only takes the others'."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, order: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.places = places
        return states.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0].index_select(0, ctx.places), None, None


class _Taken(torch.autograd.Function):
    """``states[places]``. No place occurs twice, so the backward copies and need not add."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.places, ctx.length = places, states.shape[0]
        return states.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _put(grads[0], ctx.places, ctx.length), None
