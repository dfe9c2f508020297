"""Trees of segments: a segment with a parent continues where the parent ends (shared prompts).

The tokens of a segment see its parent's tokens, those of the parent's ancestors, and their own. A document is a path
from a root to a leaf. :class:`Tree` is the tree of a batch; :mod:`.prefixes` makes one of sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from .._torch import HAS_OPERATORS, operator_later, unbacked_size, uncompiled
from . import tensors


class Level(NamedTuple):
    """The queries that see all keys of the parents at one depth of a tree."""

    # int64 [queries]: the tokens of the descendants of each parent, one parent after the other; a slice if they follow
    # each other. A token occurs once.
    tokens: torch.Tensor | slice
    # int32 [segments + 1]: the ends of each segment's queries in ``tokens``. Segments that are no parents of this depth
    # have none.
    cu_seqlens: torch.Tensor
    max_seqlen: int  # the largest number of queries of a segment
    counts: tuple[int, ...]  # each segment's number of queries


class Tree:
    """The segments of a batch and what each continues, on the host, numbered in the order of the batch."""

    def __init__(self, lengths: Sequence[int], parents: Sequence[int], device: torch.device) -> None:
        # A parent is the number of an earlier segment, or -1.
        self.lengths, self.parents, self.device = tuple(lengths), tuple(parents), device
        ends = [0, *accumulate(lengths)]
        # A segment's first token and the token behind its last, in the rows laid end to end.
        self._spans = list(zip(ends, ends[1:]))
        self.offsets: list[int] = []  # the number of each segment's ancestors' tokens
        self._paths: list[tuple[int, ...]] = []  # each segment's ancestors, the root first, and itself
        for segment, parent in enumerate(parents):
            self.offsets.append(0 if parent < 0 else self.offsets[parent] + lengths[parent])
            self._paths.append((segment,) if parent < 0 else (*self._paths[parent], segment))
        continued = set(parents)
        self.leaves = [s for s in range(len(lengths)) if lengths[s] and s not in continued]

    def path(self, segment: int) -> tuple[int, ...]:
        return self._paths[segment]

    def span(self, segment: int) -> tuple[int, int]:
        return self._spans[segment]

    def along(self, states: torch.Tensor, segment: int, dim: int = 0) -> torch.Tensor:
        # ``states`` have the batch's tokens at ``dim``, and the result has those of the segment's path, the root first.
        pieces = [states.narrow(dim, start, stop - start) for start, stop in map(self.span, self.path(segment))]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    @cached_property
    def levels(self) -> list[Level]:
        # What the parents of each depth are seen by. The first depth is that of the roots.
        made = []
        for depth in range(max(map(len, self._paths)) - 1):
            below = [segment for segment, path in enumerate(self._paths) if len(path) > depth + 1]
            below.sort(key=lambda segment: self._paths[segment][depth])  # stable: in order below each parent
            counts = [0] * len(self.lengths)
            for segment in below:
                counts[self._paths[segment][depth]] += self.lengths[segment]
            made.append(Level(self._tokens(below), tensors.ends_of(counts, self.device), max(counts), tuple(counts)))
        return made

    @cached_property
    def keys(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        # The tokens of every segment's path end to end, int64 [keys], the paths' ends, and the longest path's length.
        spans = [self.span(s) for path in self._paths for s in path]
        tokens = torch.cat([torch.arange(*span) for span in spans])
        counts = [offset + length for offset, length in zip(self.offsets, self.lengths)]
        return tensors.to_device(tokens, self.device), tensors.ends_of(counts, self.device), max(counts)

    @cached_property
    def positions(self) -> torch.Tensor:
        # For each token the number of tokens before it on its path, int64 [tokens].
        counted = [torch.arange(offset, offset + length) for offset, length in zip(self.offsets, self.lengths)]
        return tensors.to_device(torch.cat(counted), self.device)

    @cached_property
    def continues(self) -> torch.Tensor:
        # Whether a segment is another one or continues it, bool [segments, segments].
        made = torch.zeros(len(self.lengths), len(self.lengths), dtype=torch.bool)
        for segment, path in enumerate(self._paths):
            made[segment, list(path)] = True
        return tensors.to_device(made, self.device)

    def chunked(self, size: int) -> tuple[list[int], list[int]]:
        """Cut every path into chunks of ``size`` tokens (Llama 4), and return the lengths and parents of the pieces."""
        lengths: list[int] = []
        parents: list[int] = []
        last: list[int] = []
        for segment, (offset, length) in enumerate(zip(self.offsets, self.lengths)):
            before, end = self.parents[segment], offset + length
            cuts = [offset, *range(offset - offset % size + size, end, size), end]  # an empty segment stays one piece
            for at, stop in zip(cuts, cuts[1:]):
                goes_on = at == offset and before >= 0 and at % size
                parents.append(last[before] if goes_on else -1)
                lengths.append(stop - at)
            last.append(len(lengths) - 1)
        return lengths, parents

    def _tokens(self, segments: Sequence[int]) -> torch.Tensor | slice:
        spans = [self.span(segment) for segment in segments]
        if all(stop == start for (_, stop), (start, _) in zip(spans, spans[1:])):
            return slice(spans[0][0], spans[-1][1])
        return tensors.to_device(torch.cat([torch.arange(*span) for span in spans]), self.device)


@uncompiled
def _paths(
    cu_seqlens: torch.Tensor, parents: torch.Tensor, tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    cu, numbers = np.split(tensors.read(torch.cat([cu_seqlens, parents])), [cu_seqlens.shape[0]])
    tree = Tree(np.diff(cu).tolist(), numbers.tolist(), cu_seqlens.device)
    return (*tree.keys[:2], tree.positions)


def _paths_fake(
    cu_seqlens: torch.Tensor, parents: torch.Tensor, tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    whole = cu_seqlens.new_empty(unbacked_size(0), dtype=torch.int64)
    return whole, torch.empty_like(cu_seqlens), cu_seqlens.new_empty(tokens, dtype=torch.int64)


operator_later(
    "paths", _paths, "(Tensor cu_seqlens, Tensor parents, SymInt tokens) -> (Tensor, Tensor, Tensor)", _paths_fake
)


def paths(
    cu_seqlens: torch.Tensor, parents: torch.Tensor, tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``Tree.keys`` without the longest length, and ``Tree.positions``, by one read from the device."""
    # Before torch 2.4 the graph of a compiled model breaks here.
    compute = torch.ops.fa2patch.paths.default if HAS_OPERATORS else _paths
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = compute(cu_seqlens, parents, tokens)
    return found
