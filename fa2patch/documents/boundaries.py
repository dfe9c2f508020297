"""The boundaries of the documents of one batch."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from .._torch import compiling
from . import tensors
from .spans import Spans, on_the_host
from .trees import Tree, paths

Shape = tuple[int, int]


class Keys(NamedTuple):
    """The keys that the queries of each document, or segment, may see."""

    # int64 [keys]: the tokens of every segment's path, end to end. None stands for the batch's own tokens.
    tokens: torch.Tensor | None
    cu_seqlens: torch.Tensor  # int32 [documents + 1]: the ends of each document's keys
    max_seqlen: int  # or an upper bound of it


@dataclass(eq=False)
class Boundaries:
    """The boundaries of the documents of one batch, whose rows are laid end to end.

    With ``parents``, they are the boundaries of segments, and a document is a path of segments from a root to a leaf:
    the tokens of a segment see those of its ancestors and their own. Without parents, every segment is a document.

    Attributes:
        cu_seqlens: int32 tensor ``[segments + 1]`` on the batch's device: 0, then the end of every segment.
        max_seqlen: length of the longest segment in tokens, or an upper bound of it.
        positions: largest position id + 1; None if the ids were not read.
        parents: int32 tensor ``[segments]`` on the batch's device: the number of the segment that each one continues,
            which comes before it, or -1; None if no segment has a parent.
        made: objects that a kernel computes once per batch and reuses in later layers, such as a block mask.
        until: int32 tensor ``[tokens]`` on the batch's device: the last token that each token sees, where tokens of
            spans (:mod:`.spans`) see later ones; None if every token sees its document up to itself.
        uncounted: whether the number of segments becomes known only when a compiled graph runs.
        sources: the boundaries of the keys, if these are not the queries' own tokens (cross attention): all queries of
            document i see all keys of source i.
    """

    cu_seqlens: torch.Tensor
    max_seqlen: int
    positions: int | None = field(default=None, repr=False)
    _lengths: tuple[int, ...] | None = field(default=None, repr=False)
    parents: torch.Tensor | None = None
    made: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    until: torch.Tensor | None = field(default=None, repr=False)
    uncounted: bool = field(default=False, repr=False)
    sources: Boundaries | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Segment lengths in tokens. The first access may read from the device; the result is kept."""
        if self._lengths is None:
            ends = tensors.read(self.cu_seqlens)
            self._lengths = tuple((ends[1:] - ends[:-1]).tolist())
        return self._lengths

    @property
    def tree(self) -> Tree | None:
        if self.parents is None:
            return None
        if Tree not in self.made:
            _, parents = self._read_with(self.parents)
            self.made[Tree] = Tree(self.lengths, parents.tolist(), self.cu_seqlens.device)
        return self.made.get(Tree)

    @property
    def spans(self) -> Spans | None:
        if self.until is None:
            return None
        if Spans not in self.made:
            cu, until = self._read_with(self.until)
            self.made[Spans] = on_the_host(until, cu)
        return self.made.get(Spans)

    def _read_with(self, values: torch.Tensor) -> tuple[Any, Any]:
        # One read serves both tensors.
        cu, read = np.split(tensors.read(torch.cat([self.cu_seqlens, values])), [len(self) + 1])
        self._lengths = tuple(np.diff(cu).tolist())
        return cu, read

    def keys(self, tokens: int) -> Keys:
        if self.sources is not None:
            return Keys(None, self.sources.cu_seqlens, self.sources.max_seqlen)
        if self.parents is None:
            return Keys(None, self.cu_seqlens, self.max_seqlen)
        if compiling():
            return Keys(*paths(self.cu_seqlens, self.parents, tokens)[:2], tokens)
        assert self.tree is not None
        return Keys(*self.tree.keys)

    def positions_of(self, shape: Shape) -> torch.Tensor:
        # The ids are int64 [batch, length] and count from 0 along each document. Nothing is read from the device unless
        # there are parents.
        if self.parents is None:
            cu = self.cu_seqlens.long()
            token = torch.arange(shape[0] * shape[1], device=cu.device)
            return (token - cu[document_of(cu, len(token))]).view(shape)
        if compiling():
            return paths(self.cu_seqlens, self.parents, shape[0] * shape[1])[2].view(shape)
        assert self.tree is not None
        return self.tree.positions.view(shape)

    def to(self, device: torch.device) -> Boundaries:
        parents = None if self.parents is None else self.parents.to(device)
        until = None if self.until is None else self.until.to(device)
        sources = None if self.sources is None else self.sources.to(device)
        cu = self.cu_seqlens.to(device)
        return replace(self, cu_seqlens=cu, parents=parents, until=until, sources=sources, made={})

    def __len__(self) -> int:
        """The number of segments, which is the number of documents if there are no parents."""
        return int(self.cu_seqlens.shape[0]) - 1

    def chunked(self, size: int, tokens: int) -> Boundaries:
        """Boundaries with every document cut into chunks of ``size`` tokens, for chunked attention (Llama 4).

        Nothing is read from the device unless there are parents. There are as many chunks as the documents of so many
        ``tokens`` can have at most, and the last ones are empty.
        """
        if self.parents is None and not self.uncounted and self.max_seqlen <= size:
            return self
        if self.tree is not None:
            chunks, numbers = self.tree.chunked(size)
            device = self.cu_seqlens.device
            parents = tensors.to_device(torch.tensor(numbers, dtype=torch.int32), device)
            return Boundaries(tensors.ends_of(chunks, device), size, self.positions, tuple(chunks), parents)
        starts = self.cu_seqlens[:-1].long()
        counts = (self.cu_seqlens.diff() + size - 1) // size
        ends = counts.cumsum(0)
        chunk = torch.arange(starts.shape[0] + tokens // size, device=starts.device)
        document = torch.searchsorted(ends, chunk, right=True).clamp(max=starts.shape[0] - 1)
        cuts = starts[document] + size * (chunk - (ends - counts)[document])
        cu = torch.nn.functional.pad(cuts.clamp(max=tokens), (0, 1), value=tokens).to(torch.int32)
        lengths = None
        if self._lengths is not None:
            chunks = [min(size, length - at) for length in self._lengths for at in range(0, length, size)]
            lengths = (*chunks, *[0] * (cu.shape[0] - 1 - len(chunks)))
        return Boundaries(cu, size, self.positions, lengths, uncounted=self.uncounted)

    def padding_apart(self, attention_mask: torch.Tensor) -> Boundaries:
        """Boundaries with every document cut in two: its real tokens and the padding at its end; either may be empty.

        Bidirectional attention needs this, because real tokens would see the padding after them. Nothing is read from
        the device. ``attention_mask`` is ``[batch, length]``, with zeros only at the end of a document.
        """
        real = (attention_mask.flatten() != 0).to(self.cu_seqlens.device, torch.int32)
        seen = torch.nn.functional.pad(real.cumsum(0, dtype=torch.int32), (1, 0))[self.cu_seqlens.long()]
        ends = self.cu_seqlens[:-1] + seen.diff()
        cu = torch.cat([torch.stack([self.cu_seqlens[:-1], ends], dim=1).flatten(), self.cu_seqlens[-1:]])
        return Boundaries(cu, self.max_seqlen, self.positions)


def document_of(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    # The result is int64 [tokens]. Nothing is read from the device.
    token = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens, token, right=True) - 1
