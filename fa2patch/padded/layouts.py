"""Where the tokens of a padded batch are in the packed row that is computed in its place."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .._types import Call
from ..documents.names import PARENTS
from .common_prefixes import Segments


@dataclass(frozen=True)
class Layout:
    """The places of a padded batch's tokens in a packed row. Several rows may have a token of the packed row.

    Attributes:
        shape: ``(batch, length)`` of the padded batch.
        at: int64 ``[tokens]``, for each token of the packed row an index into the flattened ``[batch * length]``.
        cells: int64 ``[real tokens]``, the indices of all real tokens into the same.
        token: int64 ``[real tokens]``, the token of the packed row that each of these is; None if ``cells`` is ``at``.
    """

    shape: torch.Size
    at: torch.Tensor
    cells: torch.Tensor
    token: torch.Tensor | None

    def packed(self, value: torch.Tensor) -> torch.Tensor:
        """Turn ``[batch, length, ...]`` into ``[1, tokens, ...]``."""
        return value.flatten(0, 1)[self.at.to(value.device)][None]

    def padded(self, value: Any) -> Any:
        """Turn tensors with one entry per token into padded ones, with zeros for padding; return others unchanged."""
        if isinstance(value, (tuple, list)):
            return type(value)(self.padded(one) for one in value)
        if not isinstance(value, torch.Tensor) or value.dim() < 2:
            return value
        tokens = len(self.at)
        if tuple(value.shape[:2]) == (1, tokens):
            return self._spread(value[0]).view(*self.shape, *value.shape[2:])
        if value.shape[0] == tokens:  # router logits [tokens, experts]
            return self._spread(value)
        return value

    def _spread(self, states: torch.Tensor) -> torch.Tensor:
        """Turn ``[tokens, ...]`` into ``[batch * length, ...]``."""
        empty = states.new_zeros(self.shape[0] * self.shape[1], *states.shape[1:])
        of_cells = states if self.token is None else states.index_select(0, self.token.to(states.device))
        return empty.index_copy(0, self.cells.to(states.device), of_cells)


def packed_row(
    shape: torch.Size, starts: NDArray[Any], lengths: NDArray[Any], rows: Segments, device: torch.device
) -> tuple[Call, Layout]:
    """Make the layout of a packed row, and the arguments that describe the row to a patched model.

    Args:
        shape: ``(batch, length)`` of the padded batch.
        starts: the column of each row's first real token.
        lengths: each row's number of real tokens.
        rows: the segments of the packed row.
        device: the device of the tensors.

    Returns:
        ``cu_seq_lens_*``, ``max_length_*``, ``position_ids`` that count from 0 in each row, and ``segment_parents`` if
        there are any; and the layout.
    """
    segments = rows.segments
    first = starts + shape[1] * np.arange(shape[0])
    counts = [each.stop - each.start for each in segments]
    cu = [0, *accumulate(counts)]
    counted = [np.arange(each.start, each.stop) for each in segments]
    at = np.concatenate([first[each.row] + columns for each, columns in zip(segments, counted)])
    numbers = [at, np.concatenate(counted)]
    if rows.shared:
        numbers.append(np.concatenate([start + np.arange(length) for start, length in zip(first, lengths)]))
        numbers.append(np.concatenate([_tokens(rows, row, int(length), cu) for row, length in enumerate(lengths)]))
    cells, position_ids, *both = torch.split(
        torch.from_numpy(np.concatenate(numbers)).to(device), [len(each) for each in numbers]
    )
    ends = torch.tensor(cu, dtype=torch.int32).to(device)
    call: Call = {"position_ids": position_ids[None], "cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    call.update(max_length_q=max(counts), max_length_k=max(counts))
    if any(each.parent >= 0 for each in segments):
        call[PARENTS] = torch.tensor([each.parent for each in segments], dtype=torch.int32).to(device)
    return call, Layout(shape, cells, *(both or (cells, None)))


def _tokens(rows: Segments, row: int, length: int, cu: list[int]) -> NDArray[Any]:
    """The tokens of the packed row that are a row's tokens, in their order."""
    on_path = [(cu[number], rows.segments[number]) for number in rows.path(row)]
    return np.concatenate([at + np.arange(min(each.stop, length) - each.start) for at, each in on_path])
