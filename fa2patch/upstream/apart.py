"""Split the tensors of a packed batch into documents, and join what was computed of each document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

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
    """

    def __init__(self, boundaries: Boundaries, shape: Sequence[int]) -> None:
        self.shape, self._tree = tuple(shape[:2]), boundaries.tree
        if self._tree is None:
            self.lengths = [length for length in boundaries.lengths if length]
        else:
            self.lengths = [self._tree.offsets[leaf] + self._tree.lengths[leaf] for leaf in self._tree.leaves]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Documents:
        """The whole batch as if it were one document."""
        tokens = shape[0] * shape[1]
        return cls(Boundaries(torch.tensor([0, tokens], dtype=torch.int32), tokens, None, (tokens,)), shape)

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.lengths)

    def split(self, value: Any) -> Sequence[Any]:
        """Return an argument for each document: tensors with the batch's tokens are split to ``[1, length, ...]``.

        A packed mask becomes None. Other values are the same for every document.

        Args:
            value: the argument for the whole batch.
        """
        if isinstance(value, PackedMask):
            return [None] * len(self)
        if isinstance(value, (tuple, list)):
            columns = [self.split(each) for each in value]
            return [tuple(column[i] for column in columns) for i in range(len(self))]
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[1] != self.shape[1]:
            return [value] * len(self)
        rows = value.expand(self.shape[0], *value.shape[1:]).flatten(0, 1)
        if self._tree is None:
            return [piece[None] for piece in torch.split(rows, self.lengths)]
        return [self._tree.along(rows, leaf)[None] for leaf in self._tree.leaves]

    def of_each(self, function: Function, args: Sequence[Any], kwargs: Call) -> list[Any]:
        """Return a function's output for each document, whose part of the arguments it is given (:meth:`split`)."""
        in_order, by_name = self.split(list(args)), self.split(list(kwargs.values()))
        return [function(*given, **dict(zip(kwargs, named))) for given, named in zip(in_order, by_name)]

    def join(self, outputs: Sequence[Any]) -> Any:
        """Join the documents' outputs, ``[1, length, ...]`` to ``[batch, length, ...]``, ``[length, ...]`` end to end.

        What several paths share is taken from the first of them. If a module returns several outputs, those after the
        first that are not for each token (a last state) become None.

        Args:
            outputs: a module's output for each document.

        Raises:
            PackingNotIsolated: the first output does not have one entry for each token.
        """
        if isinstance(outputs[0], tuple):
            first, *others = zip(*outputs)
            return (self.join(first), *(self._of_tokens(other) for other in others))
        whole = self._of_tokens(outputs)
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

    def _of_tokens(self, outputs: Sequence[Any]) -> torch.Tensor | None:
        shapes = [tuple(each.shape) if isinstance(each, torch.Tensor) else () for each in outputs]
        if [each[:2] for each in shapes] == [(1, length) for length in self.lengths]:
            whole = torch.cat(tuple(self._in_order(outputs, 1)), dim=1)
            return whole.view(*self.shape, *whole.shape[2:])
        if [each[:1] for each in shapes] == [(length,) for length in self.lengths]:
            return torch.cat(tuple(self._in_order(outputs, 0)))
        return None

    def _in_order(self, outputs: Sequence[torch.Tensor], dim: int) -> Iterator[torch.Tensor]:
        """The pieces of the documents' outputs in the order of the batch."""
        tree = self._tree
        if tree is None:
            yield from outputs
            return
        taken_from = {segment: at for at in reversed(range(len(self))) for segment in tree.path(tree.leaves[at])}
        for segment, length in enumerate(tree.lengths):
            if length:
                yield outputs[taken_from[segment]].narrow(dim, tree.offsets[segment], length)
