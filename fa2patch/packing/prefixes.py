"""The tree of the prefixes that sequences have in common, as segments of a packed row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .strategies import Ints


class Segment(NamedTuple):
    """Consecutive tokens of a sequence that are in the row once.

    Attributes:
        sequence: The first sequence that has these tokens at this place.
        start: The first of these tokens in the sequence.
        stop: The token behind the last.
        parent: The number of the segment that this one continues, or -1.
        leaf: Whether the sequence ends here. Otherwise several segments continue this one.
    """

    sequence: int
    start: int
    stop: int
    parent: int
    leaf: bool


def segments(lengths: Sequence[int], shareable: Sequence[Ints], least: int) -> list[Segment]:
    """Divide sequences into segments.

    The leaves are in the order of the sequences, and each prefix stands in front of the first leaf that continues it.

    Args:
        lengths: The sequences' lengths in tokens, at least 1.
        shareable: The tokens at the start of each sequence that may be shared.
        least: Number of tokens that a shared prefix must save.
    """
    tree = _tree_of(shareable)
    tree.leave_out(least)
    made: list[Segment] = []
    number = {0: -1}
    for sequence, (length, prefix) in enumerate(zip(lengths, tree.of)):
        new = []
        while prefix not in number:
            new.append(prefix)
            prefix = tree.above[prefix]
        for below in reversed(new):
            above = tree.above[below]
            number[below] = len(made)
            made.append(Segment(sequence, tree.ends[above], tree.ends[below], number[above], leaf=False))
        longest = tree.of[sequence]
        made.append(Segment(sequence, tree.ends[longest], length, number[longest], leaf=True))
    return made


def common(one: Ints, other: Ints) -> int:
    """Return the number of tokens that two sequences begin with in common."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


class _Tree:
    """The prefixes that several sequences share. Prefix 0 is empty.

    Attributes:
        ends: Number of tokens of each prefix.
        above: For each prefix the longest shorter one that it begins with. Prefix 0 is above itself.
        of: For each sequence its longest prefix.
    """

    def __init__(self, sequences: int) -> None:
        self.ends, self.above, self.of = [0], [0], [0] * sequences

    def add(self, end: int, above: int) -> int:
        self.ends.append(end)
        self.above.append(above)
        return len(self.ends) - 1

    def leave_out(self, least: int) -> None:
        """Leave out each prefix that saves fewer tokens than ``least``. What continues it continues the one above."""
        branches = [0] * len(self.ends)
        for prefix in (*self.of, *self.above[1:]):
            branches[prefix] += 1
        left_out = set()
        shortest_first = sorted(range(1, len(self.ends)), key=self.ends.__getitem__)
        for prefix in reversed(shortest_first):
            above = self.above[prefix]
            if (branches[prefix] - 1) * (self.ends[prefix] - self.ends[above]) < least:
                left_out.add(prefix)
                branches[above] += branches[prefix] - 1
        for prefix in shortest_first:
            if self.above[prefix] in left_out:
                self.above[prefix] = self.above[self.above[prefix]]
        self.of = [self.above[prefix] if prefix in left_out else prefix for prefix in self.of]


def _tree_of(shareable: Sequence[Ints]) -> _Tree:
    """Find all shared prefixes. Sorted, sequences with a common prefix are neighbours.

    A prefix is one token shorter than what its sequences have in common: the last common token belongs to each of
    them.
    """
    keys = [tokens.astype(">i8").tobytes() for tokens in shareable]  # bytes sort as their tokens, fast
    order = sorted(range(len(keys)), key=keys.__getitem__)
    tree = _Tree(len(order))
    begun = [0]  # the prefixes of the current sequence that the next one may have too, the shortest first
    for at, sequence in enumerate(order):
        following = shareable[order[at + 1]] if at + 1 < len(order) else shareable[sequence][:0]
        end = max(common(shareable[sequence], following) - 1, 0)
        if end > tree.ends[begun[-1]]:
            begun.append(tree.add(end, begun[-1]))
        tree.of[sequence] = begun[-1]
        while tree.ends[begun[-1]] > end:
            finished = begun.pop()
            if tree.ends[begun[-1]] < end:
                begun.append(tree.add(end, begun[-1]))
                tree.above[finished] = begun[-1]
    return tree
