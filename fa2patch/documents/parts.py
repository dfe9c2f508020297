"""Parts of rows. Sequence parallelism divides every row among processes into parts of equal length."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .boundaries import Boundaries

Shape = tuple[int, int]


@dataclass(frozen=True)
class Part:
    """The part of every row that a process holds.

    Attributes:
        number: which part this is, counted from 0 in the order of the tokens.
        of: the number of parts. All have the same length.
    """

    number: int
    of: int

    def rows(self, shape: Shape) -> Shape:
        """The shape ``(batch, length)`` of the whole rows, given that of the part."""
        return shape[0], shape[1] * self.of

    def own(self, values: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The part's slice of whole rows' values, whose tokens are along ``dim``."""
        length = values.shape[dim] // self.of
        return values.narrow(dim, self.number * length, length)

    def here(self, tokens: torch.Tensor, shape: Shape) -> torch.Tensor:
        """The indices, in the part's rows laid end to end, of some tokens of the whole rows, both int64 ``[n]``.

        They are ``batch * length`` for tokens of other parts. ``shape`` is ``(batch, length)`` of the part.
        """
        length = shape[1]
        row, column = tokens // (length * self.of), tokens % (length * self.of) - self.number * length
        inside = (column >= 0) & (column < length) & (row < shape[0])
        return torch.where(inside, row * length + column, shape[0] * length)

    def clipped(self, cu_seqlens: torch.Tensor, shape: Shape) -> torch.Tensor:
        """``cu_seqlens`` of what the part holds of each document, int32 ``[documents + 1]``; some may be empty."""
        length = shape[1]
        row, column = cu_seqlens // (length * self.of), cu_seqlens % (length * self.of)
        return (row * length + (column - self.number * length).clamp(0, length)).to(torch.int32)

    def documents(self, boundaries: Boundaries, shape: Shape) -> Boundaries | None:
        """The boundaries of the part's documents; None if a document, or a path of segments, is in several parts.

        The lengths of the whole rows' documents are read from the device, once a batch.
        """
        if ("documents of", self) not in boundaries.made:
            boundaries.made["documents of", self] = self._documents(boundaries, shape)
        made: Boundaries | None = boundaries.made["documents of", self]
        return made

    def _documents(self, boundaries: Boundaries, shape: Shape) -> Boundaries | None:
        if boundaries.parents is not None:
            return None
        at, own = 0, []
        for length in filter(None, boundaries.lengths):
            part, last = at // shape[1], (at + length - 1) // shape[1]
            if part != last:
                return None
            if part % self.of == self.number:
                own.append(length)
            at += length
        cu = torch.tensor([0, *own], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return Boundaries(cu.to(boundaries.cu_seqlens.device), max(own), boundaries.positions, tuple(own))
