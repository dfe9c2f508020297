"""Sequences of which several begin alike, as a tree of segments (:mod:`.trees`) that holds each beginning once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from .trees import Tree

# A shared segment must save this many tokens. Each depth of a tree costs every layer one more attention call. On a CPU,
# a step with ``share`` was slower if it saved 2 tokens, changed little with 4 and 8, and was 4 to 6 % faster with 16. A
# padded batch, with a hidden size of 512, was 7 % slower if it saved 4 of 264 tokens, and 5 % slower with 16 of 288,
# but not with 16 of 1,056 or 28 of 544.
LEAST = 16


class Segment(NamedTuple):
    """Consecutive tokens of a sequence that are in a packed row once."""

    sequence: int  # one of the sequences that have these tokens at this place
    start: int
    stop: int  # the token behind the last one
    parent: int  # the number of the segment that this one continues, or -1


@dataclass(frozen=True)
class Prefixes:
    """Sequences as paths in a tree, in which what several of them begin with is there once."""

    segments: list[Segment]  # a parent comes before what continues it
    # For each sequence the segment that its last token is in. Tokens of that segment behind it are of others.
    last: list[int]

    @property
    def shared(self) -> bool:
        # Sequences that are equal have one segment for their last tokens.
        return len(self.segments) < len(self.last) or any(each.parent >= 0 for each in self.segments)

    @cached_property
    def tree(self) -> Tree:
        lengths = [each.stop - each.start for each in self.segments]
        return Tree(lengths, [each.parent for each in self.segments], torch.device("cpu"))

    def places(self, lengths: Sequence[int]) -> torch.Tensor:
        # The result is int64 [tokens]: where the tokens are in the row of ``tree``, one sequence after the other.
        token = torch.arange(sum(self.tree.lengths))
        return torch.cat([self.tree.along(token, end)[:length] for end, length in zip(self.last, lengths)])


def prefix_tree(
    lengths: Sequence[int],  # each is at least 1
    # Sequences that begin alike stand side by side, each with the number of first tokens that it shares with the one
    # before it: 0 for the first.
    neighbours: Iterable[tuple[int, int]],
    # The last segments of the sequences are in this order. What they share stands in front of the first of them.
    order: Iterable[int],
    # A shared segment must save so many tokens. Otherwise each segment that continues it has its tokens.
    least: int = 1,
) -> Prefixes:
    """Divide sequences into segments, so that what several of them begin with is one segment."""
    # A sequence that is the beginning of another ends inside the other's path. Sequences that are equal have one path.
    # Nodes are what will be segments: sequences are divided where they part or end. Node 0 is the root, which has no
    # tokens.
    ends, parents, sequences = [0], [-1], [-1]
    last = [0] * len(lengths)  # for each sequence the node that it ends in
    path = [0]  # the nodes that hold the sequence before

    def add(sequence: int, end: int) -> None:
        ends.append(end)
        parents.append(path[-1])
        sequences.append(sequence)
        path.append(len(ends) - 1)

    for sequence, shared in neighbours:
        below = 0
        while ends[path[-1]] > shared:
            below = path.pop()
        if ends[path[-1]] < shared:  # the sequences part inside a node, which is cut in two
            add(sequence, shared)
            parents[below] = path[-1]
        if lengths[sequence] > shared:
            add(sequence, lengths[sequence])
        last[sequence] = path[-1]

    left_out = _leave_out(ends, parents, least)
    segments: list[Segment] = []
    number = {0: -1}  # of each node among the segments
    for sequence in order:
        node = last[sequence]
        while node in left_out:
            node = left_out[node]
        last[sequence] = node
        new = []
        while node not in number:
            new.append(node)
            node = parents[node]
        for node in reversed(new):
            above = parents[node]
            number[node] = len(segments)
            segments.append(Segment(sequences[node], ends[above], ends[node], number[above]))
    return Prefixes(segments, [number[node] for node in last])


def _leave_out(ends: list[int], parents: list[int], least: int) -> dict[int, int]:
    """Let what continues a node that saves fewer tokens than ``least`` continue the node above it."""
    branches, first = [0] * len(ends), [0] * len(ends)
    for node in reversed(range(1, len(ends))):
        branches[parents[node]] += 1
        first[parents[node]] = node
    by_end = sorted(range(1, len(ends)), key=ends.__getitem__)
    left_out = {}  # each node that is left out, and the first one that continued it
    for node in reversed(by_end):
        above = parents[node]
        if branches[node] and (branches[node] - 1) * (ends[node] - ends[above]) < least:
            left_out[node] = first[node]
            branches[above] += branches[node] - 1
    for node in by_end:
        if parents[node] in left_out:
            parents[node] = parents[parents[node]]
    return left_out
