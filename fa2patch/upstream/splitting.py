"""Split the tensors of a packed batch into documents, and join what was computed of each document."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from .._types import Call, Function
from ..documents.boundaries import Boundaries
from ..documents.trees import Tree
from ..errors import PackingNotIsolated
from ..kernels.grouping import Batches
from .packed_mask import PackedMask


class Documents:
    """The documents of a batch, one by one. With a tree of segments, they are its paths from a root to a leaf."""

    def __init__(self, boundaries: Boundaries, shape: Sequence[int]) -> None:
        self.shape, self._tree = tuple(shape[:2]), boundaries.tree
        # Empty documents are left out.
        if self._tree is None:
            self.lengths = [length for length in boundaries.lengths if length]
        else:
            self.lengths = [self._tree.offsets[leaf] + self._tree.lengths[leaf] for leaf in self._tree.leaves]
        self.calls = Batches(self.lengths)  # one call computes a document, or several of near length as a batch
        self._tokens: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def in_batches(self, batches: Sequence[Sequence[int]], device: torch.device) -> Documents:
        made = copy.copy(self)
        made.calls = Batches(self.lengths, batches, device)
        return made

    def made_of(
        self, tokens: torch.Tensor, lengths: Sequence[int], batches: Sequence[Sequence[int]] | None = None
    ) -> Documents:
        """Documents of other ``lengths``, which consist of these documents' ``tokens``, numbered end to end."""
        # They can be split and computed, but not be joined to a batch.
        made = copy.copy(self)
        made.lengths, made._tokens, made.calls = [*lengths], tokens, Batches(lengths, batches, tokens.device)
        return made

    def end_to_end(self, value: torch.Tensor) -> torch.Tensor:
        # [batch or 1, length, ...] becomes [tokens, ...], laid out by documents. Tokens that several paths of a tree
        # share are repeated on each of them.
        rows = value.expand(self.shape[0], *value.shape[1:]).flatten(0, 1)
        if self._tree is not None:
            rows = torch.cat([self._tree.along(rows, leaf) for leaf in self._tree.leaves])
        return rows if self._tokens is None else rows.index_select(0, self._tokens)

    def split(self, value: Any) -> Sequence[Any]:
        # The tensors with the batch's tokens are split for each call, to [count, longest, ...]. A packed mask becomes
        # None. Other values are the same for every call.
        number = len(self.calls.shapes)
        if isinstance(value, PackedMask):
            return [None] * number
        if isinstance(value, (tuple, list)):
            columns = [self.split(each) for each in value]
            return [tuple(column[i] for column in columns) for i in range(number)]
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[1] != self.shape[1]:
            return [value] * number
        return self.calls.split(self.end_to_end(value))

    def of_each(self, function: Function, args: Sequence[Any], kwargs: Call) -> list[Any]:
        in_order, by_name = self.split(list(args)), self.split(list(kwargs.values()))
        return [function(*given, **dict(zip(kwargs, named))) for given, named in zip(in_order, by_name)]

    def tokens_of(self, outputs: Sequence[Any]) -> torch.Tensor | None:
        # The documents end to end are [tokens, ...]. The outputs are [count, longest, ...] or [count * longest, ...].
        if self._in_rows(outputs):
            return self.calls.join(outputs)
        flat = zip(outputs, self.calls.sizes)
        if all(isinstance(each, torch.Tensor) and each.shape[:1] == (size,) for each, size in flat):
            return self.calls.join([each[None] for each in outputs])
        return None

    def _in_rows(self, outputs: Sequence[Any]) -> bool:
        calls = zip(outputs, self.calls.shapes)
        return all(isinstance(each, torch.Tensor) and each.shape[:2] == call for each, call in calls)

    def join(self, outputs: Sequence[Any]) -> Any:
        # [count, longest, ...] becomes [batch, length, ...], and other outputs become [tokens, ...] end to end. What
        # several paths share is taken from the first of them. If a module returns several outputs, those after the
        # first that are not for each token (a last state) become None.
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

    def _whole(self, outputs: Sequence[Any]) -> torch.Tensor | None:
        # The order is that of the batch. If the outputs were in rows, so is the result.
        states = self.tokens_of(outputs)
        if states is None:
            return None
        tree = self._tree
        if tree is not None:
            starts, first = [0, *accumulate(self.lengths)], _first_paths(tree)
            own = [
                states.narrow(0, starts[first[segment]] + tree.offsets[segment], length)
                for segment, length in enumerate(tree.lengths)
                if length
            ]
            states = torch.cat(own)
        return states.view(*self.shape, *states.shape[1:]) if self._in_rows(outputs) else states

    def shared(self) -> tuple[int, slice, int] | None:
        # The result is a path's number, the tokens of the first segment that two paths share on it, and the number of
        # the other path.
        tree = self._tree
        if tree is None:
            return None
        first = _first_paths(tree)
        for at, leaf in enumerate(tree.leaves):
            for segment in reversed(tree.path(leaf)):
                if first[segment] != at:
                    start = tree.offsets[segment]
                    return first[segment], slice(start, start + tree.lengths[segment]), at
        return None


def _first_paths(tree: Tree) -> dict[int, int]:
    return {segment: at for at in reversed(range(len(tree.leaves))) for segment in tree.path(tree.leaves[at])}


def rotary_of_each(
    rotary: Function, x: torch.Tensor, position_ids: torch.Tensor, documents: Boundaries, kwargs: Call
) -> Any:
    # cos and sin are [batch, length, dim]. The rotary module takes its device and dtype from `x`. It is not told the
    # row's length, `seq_len`.
    kwargs = {name: value for name, value in kwargs.items() if name != "seq_len"}
    each = Documents(documents, position_ids.shape)
    return each.join([rotary(x, position_ids=ids, **kwargs) for ids in each.split(position_ids)])
