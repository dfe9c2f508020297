"""The part of every row that a process holds, where an engine splits rows over processes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .boundaries import Boundaries, Shape
from .tensors import ends_of, to_device

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(eq=False)
class Order:
    """The tokens of a row in the order in which its parts hold them.

    Attributes:
        tokens: int64 ``[length]``: those of the first part, then those of the second, each in the order of its process.
        sizes: the tokens of each part.
    """

    tokens: NDArray[Any]
    sizes: tuple[int, ...]
    _on: dict[object, torch.Tensor] = field(default_factory=dict, repr=False)

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def starts(self) -> NDArray[Any]:
        # where each part starts in `tokens`, and the end: int64 [parts + 1]
        return np.cumsum([0, *self.sizes])

    @property
    def places(self) -> NDArray[Any]:
        """Where each token of the row stands in ``tokens``."""
        places = np.empty(self.length, np.int64)
        places[self.tokens] = np.arange(self.length)
        return places

    def on(self, device: torch.device, places: bool = False) -> torch.Tensor:
        # `tokens`, or `places`, on the device
        kind = device, places
        if kind not in self._on:
            self._on[kind] = to_device(torch.from_numpy(self.places if places else self.tokens), device)
        return self._on[kind]


@functools.lru_cache(maxsize=8)  # with its indices on the device
def consecutive(length: int, parts: int) -> Order:
    # as torch.chunk cuts: parts are rounded up, so that the last ones may have fewer tokens, or none
    size = -(-length // parts)
    ends = np.minimum(np.arange(parts + 1) * size, length)
    return Order(np.arange(length), tuple(np.diff(ends).tolist()))


@functools.lru_cache(maxsize=8)
def head_and_tail(length: int, parts: int) -> Order:
    # each part has a piece of the row's head and the mirrored one of its tail; 2 * parts divides the length
    pieces = np.arange(length).reshape(2 * parts, -1)
    mirrored = np.stack([pieces[:parts], pieces[parts:][::-1]], 1)
    return Order(mirrored.reshape(-1), (length // parts,) * parts)


@dataclass(frozen=True)
class Part:
    """The part of every row that a process holds."""

    number: int  # counted from 0 in the order of the processes
    of: int  # the number of parts
    # None: the parts are consecutive and of one length, which a compiled graph needs not know
    order: Order | None = None

    def rows(self, shape: Shape) -> Shape:
        # The shape is that of the part, and the result is that of the whole rows.
        return shape[0], shape[1] * self.of if self.order is None else self.order.length

    def own(self, values: torch.Tensor, dim: int = -1) -> torch.Tensor:
        # The values are those of whole rows, with the tokens along ``dim``.
        if self.order is None:
            length = values.shape[dim] // self.of
            return values.narrow(dim, self.number * length, length)
        start, end = self.order.starts[self.number : self.number + 2].tolist()
        return values.index_select(dim, self.order.on(values.device)[start:end])

    def here(self, tokens: torch.Tensor, shape: Shape) -> torch.Tensor:
        # The tokens, int64 [n], are indices into the whole rows. The result has their places in the part's rows laid
        # end to end, of ``shape``, and ``batch * length`` for tokens of other parts.
        (batch, length), (_, whole) = shape, self.rows(shape)
        row, column = tokens // whole, tokens % whole
        start = self.number * length
        if self.order is not None:
            column = self.order.on(tokens.device, places=True)[column]
            start = int(self.order.starts[self.number])
        column = column - start
        inside = (column >= 0) & (column < length) & (row < batch)
        return torch.where(inside, row * length + column, batch * length)

    def clipped(self, boundaries: Boundaries, shape: Shape) -> torch.Tensor:
        # The result is int32 [pieces + 1]: the ends of what the part holds of each document, which may be nothing.
        if self.order is not None:
            pieces = self.pieces(boundaries, shape)
            return ends_of(pieces.lengths[pieces.of_part(self.number)].tolist(), boundaries.cu_seqlens.device)
        (_, length), (_, whole) = shape, self.rows(shape)
        row, column = boundaries.cu_seqlens // whole, boundaries.cu_seqlens % whole
        return (row * length + (column - self.number * length).clamp(0, length)).to(torch.int32)

    def documents(self, boundaries: Boundaries, shape: Shape) -> Boundaries | None:
        """The boundaries of the part's documents; None if a document, or a path of segments, is in several parts."""
        # Every process finds None alike.
        key = "documents of", self
        if key not in boundaries.made:
            boundaries.made[key] = self._documents(boundaries, shape)
        made: Boundaries | None = boundaries.made[key]
        return made

    def pieces(self, boundaries: Boundaries, shape: Shape) -> Pieces:
        # Lengths of the whole rows' documents are read from the device, once for each batch.
        key = Pieces, self
        if key not in boundaries.made:
            order = consecutive(self.rows(shape)[1], self.of) if self.order is None else self.order
            boundaries.made[key] = Pieces.of(boundaries.lengths, order, shape[0])
        made: Pieces = boundaries.made[key]
        return made

    def _documents(self, boundaries: Boundaries, shape: Shape) -> Boundaries | None:
        if boundaries.parents is not None:
            return None
        pieces = self.pieces(boundaries, shape)
        if pieces.cut:
            return None
        own = pieces.lengths[pieces.of_part(self.number)].tolist()
        return Boundaries(
            ends_of(own, boundaries.cu_seqlens.device), max(own, default=0), boundaries.positions, tuple(own)
        )


@dataclass(eq=False)
class Pieces:
    """The pieces that a split makes of the documents of a batch, in the order of its tokens.

    A piece is a run of a document's tokens that lie side by side in one part. All arrays are int64 ``[pieces]``, and
    tokens are numbered through all rows.
    """

    starts: NDArray[Any]  # its first token
    ends: NDArray[Any]  # the token behind its last
    parts: NDArray[Any]  # the number of its part
    places: NDArray[Any]  # where it starts among its part's tokens, whose rows are laid end to end
    documents: NDArray[Any]  # the number of its document, among those with tokens
    first: NDArray[Any]  # its document's first token
    last: NDArray[Any]  # the token behind its document's last

    @classmethod
    def of(cls, lengths: Sequence[int], order: Order, rows: int = 1) -> Pieces:
        ends = np.cumsum([length for length in lengths if length])
        cuts = np.flatnonzero(np.diff(order.tokens, prepend=-2) != 1)  # where a run starts in the order
        cuts = np.union1d(cuts, order.starts[:-1][np.array(order.sizes) > 0])
        part = np.searchsorted(order.starts, cuts, side="right") - 1
        size, row = np.array(order.sizes)[part], np.arange(rows)[:, None]
        run = (order.tokens[cuts] + row * order.length).ravel()
        place = (cuts - order.starts[part] + row * size).ravel()
        sorting = np.argsort(run)
        run, place, part = run[sorting], place[sorting], np.tile(part, rows)[sorting]
        starts = np.union1d(run, np.concatenate([[0], ends[:-1]]))
        of_run = np.searchsorted(run, starts, side="right") - 1
        documents = np.searchsorted(ends, starts, side="right")
        return cls(
            starts,
            np.append(starts[1:], ends[-1]),
            part[of_run],
            place[of_run] + starts - run[of_run],
            documents,
            np.append(0, ends[:-1])[documents],
            ends[documents],
        )

    @property
    def lengths(self) -> NDArray[Any]:
        lengths: NDArray[Any] = self.ends - self.starts
        return lengths

    @property
    def cut(self) -> bool:
        """Whether a document is in several pieces."""
        return len(self.starts) > int(self.documents[-1]) + 1

    def of_part(self, number: int) -> NDArray[Any]:
        # the numbers of its pieces, in the order of its tokens
        own = np.flatnonzero(self.parts == number)
        sorted_by_place: NDArray[Any] = own[np.argsort(self.places[own])]
        return sorted_by_place
