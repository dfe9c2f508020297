"""The segments of a tree for the plain formula: each in a call of its own, with the keys of its whole path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..documents.trees import Tree


class Paths(NamedTuple):
    """The counterpart of :class:`.grouping.Documents` for a tree.

    Attributes:
        tree: the segments and what each continues.
    """

    tree: Tree

    @property
    def last(self) -> tuple[None, ...]:
        """No query sees a later key."""
        return (None,) * len(self.tree.lengths)

    def queries(self, states: torch.Tensor) -> Sequence[torch.Tensor]:
        """Split states ``[tokens, ...]`` into those of each segment, ``[1, length, ...]``."""
        return [piece[None] for piece in torch.split(states, list(self.tree.lengths))]

    def keys(self, states: torch.Tensor) -> Sequence[torch.Tensor]:
        """The states ``[tokens, ...]`` of each segment's path, the root first: ``[1, length of the path, ...]``."""
        return [self.tree.along(states, segment)[None] for segment in range(len(self.tree.lengths))]

    def joined(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join the segments' results ``[1, length, ...]`` to ``[tokens, ...]``."""
        return torch.cat([piece[0] for piece in pieces])

    def gradients(self, grad: torch.Tensor) -> Sequence[torch.Tensor]:
        """The gradients of what :meth:`joined` joins, from that of its result."""
        return self.queries(grad)

    def summed(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """The gradient of the states that :meth:`keys` splits. A segment is on the paths of all that continue it."""
        tree = self.tree
        whole = pieces[0].new_zeros(sum(tree.lengths), *pieces[0].shape[2:])
        for segment, found in enumerate(pieces):
            path = tree.path(segment)
            for one, piece in zip(path, torch.split(found[0], [tree.lengths[one] for one in path])):
                whole[slice(*tree.span(one))] += piece
        return whole
