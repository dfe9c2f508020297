"""Trees of segments: a segment with a parent continues where the parent ends (shared prompts).

The tokens of a segment see its parent's tokens, those of the parent's ancestors, and their own. A document is a path
from a root to a leaf. :class:`Tree` is the tree of a batch, and :func:`prefix_tree` makes one of sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Callable, NamedTuple

import numpy as np
import torch

from .._torch import HAS_OPERATORS, unbacked_size, uncompiled
from . import tensors


class Level(NamedTuple):
    """The queries that see all keys of the parents at one depth of a tree.

    Attributes:
        tokens: the tokens of the descendants of each parent, one parent after the other, int64 ``[queries]``; a slice
            if they follow each other. A token occurs once.
        cu_seqlens: int32 ``[segments + 1]``, the ends of each segment's queries in ``tokens``. Segments that are no
            parents of this depth have none.
        max_seqlen: the largest number of queries of a segment.
        counts: the segments' numbers of queries.
    """

    tokens: torch.Tensor | slice
    cu_seqlens: torch.Tensor
    max_seqlen: int
    counts: tuple[int, ...]


class Tree:
    """The segments of a batch and what each continues, on the host. They are numbered in the order of the batch.

    Args:
        lengths: the segments' lengths in tokens.
        parents: for each segment the number of its parent, which comes before it, or -1.
        device: the device of the tensors.

    Attributes:
        offsets: for each segment the number of its ancestors' tokens.
        leaves: the segments that are nobody's parent and have tokens, in order.
    """

    def __init__(self, lengths: Sequence[int], parents: Sequence[int], device: torch.device) -> None:
        self.lengths, self.parents, self.device = tuple(lengths), tuple(parents), device
        ends = [0, *accumulate(lengths)]
        self._spans = list(zip(ends, ends[1:]))
        self.offsets: list[int] = []
        self._paths: list[tuple[int, ...]] = []
        for segment, parent in enumerate(parents):
            self.offsets.append(0 if parent < 0 else self.offsets[parent] + lengths[parent])
            self._paths.append((segment,) if parent < 0 else (*self._paths[parent], segment))
        continued = set(parents)
        self.leaves = [s for s in range(len(lengths)) if lengths[s] and s not in continued]

    def path(self, segment: int) -> tuple[int, ...]:
        """The segment's ancestors, the root first, and the segment itself."""
        return self._paths[segment]

    def span(self, segment: int) -> tuple[int, int]:
        """A segment's first token and the token behind its last, in the rows laid end to end."""
        return self._spans[segment]

    def along(self, states: torch.Tensor, segment: int, dim: int = 0) -> torch.Tensor:
        """The part of a tensor with the batch's tokens at ``dim`` that belongs to a segment's path, root first."""
        pieces = [states.narrow(dim, start, stop - start) for start, stop in map(self.span, self.path(segment))]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    @cached_property
    def levels(self) -> list[Level]:
        """What each depth's parents are seen by. The first one is of the roots."""
        made = []
        for depth in range(max(map(len, self._paths)) - 1):
            below = [segment for segment, path in enumerate(self._paths) if len(path) > depth + 1]
            below.sort(key=lambda segment: self._paths[segment][depth])  # stable: in order below each parent
            counts = [0] * len(self.lengths)
            for segment in below:
                counts[self._paths[segment][depth]] += self.lengths[segment]
            made.append(Level(self._tokens(below), self._ends(counts), max(counts), tuple(counts)))
        return made

    @cached_property
    def keys(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """The tokens of every segment's path end to end, int64 ``[keys]``, the paths' ends, and the longest."""
        spans = [self.span(s) for path in self._paths for s in path]
        tokens = torch.cat([torch.arange(*span) for span in spans])
        counts = [offset + length for offset, length in zip(self.offsets, self.lengths)]
        return tokens.to(self.device), self._ends(counts), max(counts)

    @cached_property
    def positions(self) -> torch.Tensor:
        """For each token the number of tokens before it on its path, int64 ``[tokens]``."""
        counted = [torch.arange(offset, offset + length) for offset, length in zip(self.offsets, self.lengths)]
        return torch.cat(counted).to(self.device)

    @cached_property
    def continues(self) -> torch.Tensor:
        """Whether a segment is another one or continues it, bool ``[segments, segments]``."""
        made = torch.zeros(len(self.lengths), len(self.lengths), dtype=torch.bool)
        for segment, path in enumerate(self._paths):
            made[segment, list(path)] = True
        return made.to(self.device)

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
        return torch.cat([torch.arange(*span) for span in spans]).to(self.device)

    def _ends(self, counts: Sequence[int]) -> torch.Tensor:
        return torch.tensor([0, *counts]).cumsum(0).to(self.device, torch.int32)


class Segment(NamedTuple):
    """Consecutive tokens of a sequence that are in a packed row once.

    Attributes:
        sequence: one of the sequences that have these tokens at this place.
        start: the first of these tokens in the sequence.
        stop: the token behind the last.
        parent: the number of the segment that this one continues, or -1.
    """

    sequence: int
    start: int
    stop: int
    parent: int


@dataclass(frozen=True)
class Prefixes:
    """Sequences as paths in a tree, in which what several of them begin with is there once.

    Attributes:
        segments: the tree. A parent comes before what continues it.
        last: for each sequence the segment that its last token is in. Tokens of that segment behind it are of others.
    """

    segments: list[Segment]
    last: list[int]

    @property
    def shared(self) -> bool:
        """Whether any sequences have a segment in common."""
        return len(self.segments) < len(self.last) or any(each.parent >= 0 for each in self.segments)

    @cached_property
    def tree(self) -> Tree:
        """The tree of the packed row that holds the segments in their order, on the host."""
        lengths = [each.stop - each.start for each in self.segments]
        return Tree(lengths, [each.parent for each in self.segments], torch.device("cpu"))

    def places(self, lengths: Sequence[int]) -> torch.Tensor:
        """Where the sequences' tokens are in that row, one sequence after the other, int64 ``[tokens]``."""
        token = torch.arange(sum(self.tree.lengths))
        return torch.cat([self.tree.along(token, end)[:length] for end, length in zip(self.last, lengths)])


def prefix_tree(
    lengths: Sequence[int], neighbours: Iterable[tuple[int, int]], order: Iterable[int], least: int = 1
) -> Prefixes:
    """Divide sequences into segments, so that what several of them begin with is one segment.

    A sequence that is the beginning of another ends inside the other's path. Sequences that are equal have one path.

    Args:
        lengths: the sequences' lengths in tokens, at least 1.
        neighbours: the sequences in an order in which those that begin alike stand side by side, each with the number
            of first tokens that it shares with the one before it: 0 for the first.
        order: the sequences in the order of their last segments. What they share stands in front of the first of them.
        least: the number of tokens, at least 1, that a shared segment must save. Otherwise each segment that continues
            it has its tokens.
    """
    nodes, last = _nodes(lengths, neighbours)
    left_out = _leave_out(nodes, least)
    segments: list[Segment] = []
    number = {0: -1}
    for sequence in order:
        node = last[sequence]
        while node in left_out:
            node = left_out[node]
        last[sequence] = node
        new = []
        while node not in number:
            new.append(node)
            node = nodes.parents[node]
        for node in reversed(new):
            above = nodes.parents[node]
            number[node] = len(segments)
            segments.append(Segment(nodes.sequences[node], nodes.ends[above], nodes.ends[node], number[above]))
    return Prefixes(segments, [number[node] for node in last])


class _Nodes(NamedTuple):
    """What will be segments. Node 0 is the root, which has no tokens."""

    ends: list[int]
    parents: list[int]
    sequences: list[int]


def _nodes(lengths: Sequence[int], neighbours: Iterable[tuple[int, int]]) -> tuple[_Nodes, list[int]]:
    """Divide sequences where they part or end. Returns the nodes, and for each sequence the one that it ends in."""
    nodes, last = _Nodes([0], [-1], [-1]), [0] * len(lengths)
    path = [0]  # the nodes that hold the sequence before

    def add(sequence: int, end: int) -> None:
        nodes.ends.append(end)
        nodes.parents.append(path[-1])
        nodes.sequences.append(sequence)
        path.append(len(nodes.ends) - 1)

    for sequence, shared in neighbours:
        below = 0
        while nodes.ends[path[-1]] > shared:
            below = path.pop()
        if nodes.ends[path[-1]] < shared:  # the sequences part inside a node, which is cut in two
            add(sequence, shared)
            nodes.parents[below] = path[-1]
        if lengths[sequence] > shared:
            add(sequence, lengths[sequence])
        last[sequence] = path[-1]
    return nodes, last


def _leave_out(nodes: _Nodes, least: int) -> dict[int, int]:
    """Let what continues a node that saves fewer tokens than ``least`` continue the node above it.

    Returned is each node that is left out, and the first one that continued it.
    """
    ends, parents = nodes.ends, nodes.parents
    branches, first = [0] * len(ends), [0] * len(ends)
    for node in reversed(range(1, len(ends))):
        branches[parents[node]] += 1
        first[parents[node]] = node
    by_end = sorted(range(1, len(ends)), key=ends.__getitem__)
    left_out = {}
    for node in reversed(by_end):
        above = parents[node]
        if branches[node] and (branches[node] - 1) * (ends[node] - ends[above]) < least:
            left_out[node] = first[node]
            branches[above] += branches[node] - 1
    for node in by_end:
        if parents[node] in left_out:
            parents[node] = parents[parents[node]]
    return left_out


@uncompiled
def _paths(
    cu_seqlens: torch.Tensor, parents: torch.Tensor, tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    cu, numbers = np.split(tensors.read(torch.cat([cu_seqlens, parents])), [cu_seqlens.shape[0]])
    tree = Tree(np.diff(cu).tolist(), numbers.tolist(), cu_seqlens.device)
    return (*tree.keys[:2], tree.positions)


paths: Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = _paths
"""Called as ``paths(cu_seqlens, parents, tokens)``, with int32 ``[segments + 1]``, int32 ``[segments]`` and the number
of tokens. Returns ``Tree.keys`` without the longest length, and ``Tree.positions``. It reads from the device once."""

if HAS_OPERATORS:  # from torch 2.4 on; before that the graph of a compiled model breaks here
    paths = torch.library.custom_op(
        "fa2patch::paths",
        _paths,
        mutates_args=(),
        schema="(Tensor cu_seqlens, Tensor parents, SymInt tokens) -> (Tensor, Tensor, Tensor)",
    )

    @paths.register_fake
    def _(
        cu_seqlens: torch.Tensor, parents: torch.Tensor, tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        keys = unbacked_size(0)
        whole = cu_seqlens.new_empty(keys, dtype=torch.int64)
        return whole, torch.empty_like(cu_seqlens), cu_seqlens.new_empty(tokens, dtype=torch.int64)
