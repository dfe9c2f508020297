"""Split the tensors of a packed batch into documents, and join what was computed of each document.

Documents can be laid into batches (:meth:`Documents.in_batches`): one call then computes several of them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from .._types import Call, Function
from ..documents.boundaries import Boundaries
from ..errors import PackingNotIsolated
from .packed_mask import PackedMask


class Documents:
    """The documents of a batch, one by one. With a tree of segments, they are its paths from a root to a leaf.

    Args:
        boundaries: the batch's boundaries.
        shape: ``(batch, length)`` of the batch.

    Attributes:
        lengths: the documents' lengths in tokens. Empty documents are left out.
        batches: the numbers of the documents in each call of a module: one, unless they are in batches.
        calls: for each call the number of documents and the length of the longest.
        sizes: the length of the longest call with several documents, and that of the longest document with padding.
    """

    def __init__(self, boundaries: Boundaries, shape: Sequence[int]) -> None:
        self.shape, self._tree = tuple(shape[:2]), boundaries.tree
        if self._tree is None:
            self.lengths = [length for length in boundaries.lengths if length]
        else:
            self.lengths = [self._tree.offsets[leaf] + self._tree.lengths[leaf] for leaf in self._tree.leaves]
        self.batches: Sequence[Sequence[int]] = [[at] for at in range(len(self.lengths))]
        self.calls = [(1, length) for length in self.lengths]
        self.sizes = (0, 0)
        self._places: torch.Tensor | None = None

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Documents:
        """The whole batch as if it were one document."""
        tokens = shape[0] * shape[1]
        made = cls(Boundaries(torch.tensor([0, tokens], dtype=torch.int32), tokens, None, (tokens,)), shape)
        made.sizes = (tokens, 0)
        return made

    def in_batches(self, batches: Sequence[Sequence[int]], device: torch.device) -> Documents:
        """The same documents, computed in these batches. A batch is padded to its longest document with zeros.

        Args:
            batches: the numbers of the documents in each batch. Every document is in one of them.
            device: the device of the batch.
        """
        made = copy.copy(self)
        made.batches = batches
        made.calls = [(len(batch), max(self.lengths[at] for at in batch)) for batch in batches]
        starts, size = np.zeros(len(self), np.int64), 0
        shared = padded = 0
        for batch, (count, longest) in zip(batches, made.calls):
            shared = max(shared, longest if count > 1 else 0)
            for at in batch:
                starts[at], size = size, size + longest
                padded = max(padded, self.lengths[at] if self.lengths[at] < longest else 0)
        made.sizes = shared, padded
        lengths = np.array(self.lengths)
        behind = starts - (np.cumsum(lengths) - lengths)  # how far each document moves
        places = np.arange(lengths.sum()) + np.repeat(behind, lengths)
        made._places = torch.from_numpy(places).to(device, non_blocking=True)
        return made

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.lengths)

    @property
    def size(self) -> int:
        """The number of tokens that all calls compute, with padding."""
        return sum(count * longest for count, longest in self.calls)

    def end_to_end(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor with the batch's tokens, laid out by documents: ``[batch or 1, length, ...]`` to ``[tokens, ...]``.

        Tokens that several paths of a tree share are repeated on each of them.
        """
        rows = value.expand(self.shape[0], *value.shape[1:]).flatten(0, 1)
        if self._tree is None:
            return rows
        return torch.cat([self._tree.along(rows, leaf) for leaf in self._tree.leaves])

    def portions(self, states: torch.Tensor, filling: torch.Tensor | None = None) -> list[torch.Tensor]:
        """What each call gets of the documents' tokens ``[tokens, ...]``: tensors ``[count, longest, ...]``.

        Args:
            states: the documents end to end.
            filling: ``[size, ...]``, whose values stand where batches are padded; None for zeros.
        """
        if self._places is not None:
            filling = states.new_zeros(self.size, *states.shape[1:]) if filling is None else filling
            states = filling.index_copy(0, self._places, states)
        pieces = torch.split(states, [count * longest for count, longest in self.calls])
        return [piece.view(*call, *states.shape[1:]) for piece, call in zip(pieces, self.calls)]

    def split(self, value: Any) -> Sequence[Any]:
        """Return an argument for each call: tensors with the batch's tokens are split to ``[count, longest, ...]``.

        A packed mask becomes None. Other values are the same for every call.

        Args:
            value: the argument for the whole batch.
        """
        if isinstance(value, PackedMask):
            return [None] * len(self.calls)
        if isinstance(value, (tuple, list)):
            columns = [self.split(each) for each in value]
            return [tuple(column[i] for column in columns) for i in range(len(self.calls))]
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[1] != self.shape[1]:
            return [value] * len(self.calls)
        return self.portions(self.end_to_end(value))

    def of_each(self, function: Function, args: Sequence[Any], kwargs: Call) -> list[Any]:
        """Return a function's output for each call, with its part of the arguments (:meth:`split`)."""
        in_order, by_name = self.split(list(args)), self.split(list(kwargs.values()))
        return [function(*given, **dict(zip(kwargs, named))) for given, named in zip(in_order, by_name)]

    def tokens_of(self, outputs: Sequence[Any]) -> torch.Tensor | None:
        """The documents end to end ``[tokens, ...]``, from the calls' outputs; None if these are not for each token.

        Args:
            outputs: a tensor ``[count, longest, ...]`` or ``[count * longest, ...]`` for each call.
        """
        shapes = [tuple(each.shape) if isinstance(each, torch.Tensor) else () for each in outputs]
        if self._are_batches(shapes):
            states = torch.cat([each.flatten(0, 1) for each in outputs])
        elif [each[:1] for each in shapes] == [(count * longest,) for count, longest in self.calls]:
            states = torch.cat(tuple(outputs))
        else:
            return None
        return states if self._places is None else states.index_select(0, self._places)

    def _are_batches(self, shapes: Sequence[tuple[int, ...]]) -> bool:
        """Whether these are shapes ``[count, longest, ...]`` of the calls' outputs."""
        return [shape[:2] for shape in shapes] == self.calls

    def join(self, outputs: Sequence[Any]) -> Any:
        """Join the calls' outputs, ``[count, longest, ...]`` to ``[batch, length, ...]``, ``[tokens, ...]`` end to end.

        What several paths share is taken from the first of them. If a module returns several outputs, those after the
        first that are not for each token (a last state) become None.

        Args:
            outputs: a module's output for each call.

        Raises:
            PackingNotIsolated: the first output does not have one entry for each token.
        """
        if isinstance(outputs[0], tuple):
            first, *others = zip(*outputs)
            return (self.join(first), *(self._whole(other) for other in others))
        whole = self._whole(outputs)
        if whole is None:
            found = f"{type(outputs[0]).__name__} {list(getattr(outputs[0], 'shape', []))}"
            raise PackingNotIsolated(
                f"a module returned something that is not for each token ({found}): computed document by document, "
                "there is one for each of them. Train this model padded, and please report it."
            )
        return whole

    def shared(self) -> tuple[int, slice, int] | None:
        """The first segment that two paths share: a path's number, the segment's tokens on it, and the other's number.

        None if no two paths share a segment.
        """
        taken_from: dict[int, int] = {}
        for at, leaf in enumerate(self._tree.leaves if self._tree is not None else []):
            assert self._tree is not None
            for segment in reversed(self._tree.path(leaf)):
                if segment in taken_from:
                    start = self._tree.offsets[segment]
                    return taken_from[segment], slice(start, start + self._tree.lengths[segment]), at
                taken_from[segment] = at
        return None

    def _whole(self, outputs: Sequence[Any]) -> torch.Tensor | None:
        """What :meth:`tokens_of` returns, in the order of the batch and, if the outputs were so, in its shape."""
        states = self.tokens_of(outputs)
        if states is None:
            return None
        if self._tree is not None:
            states = torch.cat(tuple(self._in_order(states)))
        by_rows = self._are_batches([tuple(each.shape) for each in outputs])
        return states.view(*self.shape, *states.shape[1:]) if by_rows else states

    def _in_order(self, states: torch.Tensor) -> Iterator[torch.Tensor]:
        """The pieces of the paths' states ``[tokens, ...]`` in the order of the batch."""
        tree = self._tree
        assert tree is not None
        starts = [0, *accumulate(self.lengths)]
        taken_from = {segment: at for at in reversed(range(len(self))) for segment in tree.path(tree.leaves[at])}
        for segment, length in enumerate(tree.lengths):
            if length:
                yield states.narrow(0, starts[taken_from[segment]] + tree.offsets[segment], length)
