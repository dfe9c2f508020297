"""The boundaries of the documents of one batch, and the position ids that they give."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from . import device
from .starts import Flags


@dataclass(eq=False)
class Boundaries:
    """The boundaries of the documents of one batch, whose rows are laid end to end.

    Attributes:
        cu_seqlens: int32 tensor ``[documents + 1]`` on the batch's device: 0, then the end of every document.
        max_seqlen: length of the longest document in tokens, or an upper bound of it.
        positions: largest position id + 1; None if the ids were not read.
        made: objects that a kernel computes once per batch and reuses in later layers, such as a block mask.
    """

    cu_seqlens: torch.Tensor
    max_seqlen: int
    positions: int | None = field(default=None, repr=False)
    _lengths: tuple[int, ...] | None = field(default=None, repr=False)
    made: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Document lengths in tokens. The first access may read from the device; the result is kept."""
        if self._lengths is None:
            self._lengths = tuple(np.diff(device.read(self.cu_seqlens)).tolist())
        return self._lengths

    def __len__(self) -> int:
        """The number of documents."""
        return int(self.cu_seqlens.shape[0]) - 1

    def chunked(self, size: int) -> Boundaries:
        """Boundaries with every document cut into chunks of ``size`` tokens, for chunked attention (Llama 4)."""
        if self.max_seqlen <= size:
            return self
        chunks = [min(size, length - at) for length in self.lengths for at in range(0, length, size)]
        cu = torch.tensor([0, *chunks], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return Boundaries(cu.to(self.cu_seqlens.device), size, self.positions, tuple(chunks))

    def padding_apart(self, attention_mask: torch.Tensor) -> Boundaries:
        """Boundaries with every document cut in two: its real tokens and the padding at its end.

        Bidirectional attention needs this, because real tokens would see the padding after them. Either part may be
        empty. Nothing is read from the device.

        Args:
            attention_mask: ``[batch, length]``; zeros only at the end of a document.
        """
        real = (attention_mask.flatten() != 0).to(self.cu_seqlens.device, torch.int32)
        seen = torch.nn.functional.pad(real.cumsum(0, dtype=torch.int32), (1, 0))[self.cu_seqlens.long()]
        ends = self.cu_seqlens[:-1] + seen.diff()
        cu = torch.cat([torch.stack([self.cu_seqlens[:-1], ends], dim=1).flatten(), self.cu_seqlens[-1:]])
        return Boundaries(cu, self.max_seqlen, self.positions)


def positions_of(cu_seqlens: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Position ids, int64 ``[batch, length]``, that count from 0 in each document. Nothing is read from the device."""
    cu = cu_seqlens.flatten().long()
    token = torch.arange(shape[0] * shape[1], device=cu.device)
    document = torch.searchsorted(cu, token, right=True) - 1
    return (token - cu[document]).view(shape)


def largest(numbers: torch.Tensor) -> int:
    """The largest of some integers. This reads from the device once."""
    return int(device.read(numbers).max())


def from_starts(starts: Flags, on: torch.device, positions: int | None) -> Boundaries:
    """The boundaries of documents whose first tokens are True in ``starts``, a bool array ``[batch, length]``."""
    ends = np.append(np.flatnonzero(starts.ravel()), starts.size)
    lengths = np.diff(ends)
    cu = torch.from_numpy(ends.astype(np.int32)).to(on, non_blocking=True)
    return Boundaries(cu, int(lengths.max()), positions, tuple(lengths.tolist()))
