"""Where the tokens of a padded batch are in the packed row that is computed in its place."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .._types import Call
from ..documents import device
from ..documents.names import PARENTS
from ..errors import PackingNotIsolated
from .common_prefixes import Segments


@dataclass(frozen=True)
class Layout:
    """The places of a padded batch's tokens in a packed row. Several rows may have a token of the packed row.

    Attributes:
        shape: ``(batch, length)`` of the padded batch.
        at: int64 ``[tokens]``, for each token of the packed row an index into the flattened ``[batch * length]``.
        cells: int64 ``[real tokens]``, the indices of all real tokens into the same.
        padding: int64, the indices of padding into the same.
        token: int64 ``[real tokens]``, the token of the packed row that each of these is; None if ``cells`` is ``at``.
    """

    shape: torch.Size
    at: torch.Tensor
    cells: torch.Tensor
    padding: torch.Tensor
    token: torch.Tensor | None

    def packed(self, value: torch.Tensor) -> torch.Tensor:
        """Turn ``[batch, length, ...]`` into ``[1, tokens, ...]``."""
        return value.flatten(0, 1)[self.at.to(value.device)][None]

    def padded(self, value: Any, noise: bool = False) -> Any:
        """Turn tensors with one entry per token into padded ones; return others unchanged.

        Args:
            value: a tensor or a container of such.
            noise: whether padding gets random numbers. Otherwise it gets zeros, and a gradient there is an error.
        """
        if isinstance(value, (tuple, list)):
            return type(value)(self.padded(one, noise) for one in value)
        if not isinstance(value, torch.Tensor) or value.dim() < 2:
            return value
        tokens = len(self.at)
        if value.dim() > 2 and tuple(value.shape[:2]) == (1, tokens):  # [1, n] is one row's vector
            return self._spread(value[0], noise).view(*self.shape, *value.shape[2:])
        if value.shape[0] == tokens:  # router logits [tokens, experts]
            return self._spread(value, noise)
        return value

    def _spread(self, states: torch.Tensor, noise: bool) -> torch.Tensor:
        """Turn ``[tokens, ...]`` into ``[batch * length, ...]``."""
        empty = states.new_zeros(self.shape[0] * self.shape[1], *states.shape[1:])
        if noise and states.is_floating_point():  # beyond every real value, so that a maximum over the row shows too
            drawn = torch.rand(empty.shape, generator=torch.Generator().manual_seed(0)) * 4 - 2
            empty = drawn.to(states) * states.detach().abs().max()
        of_cells = states if self.token is None else states.index_select(0, self.token.to(states.device))
        spread = empty.index_copy(0, self.cells.to(states.device), of_cells)
        if spread.requires_grad and len(self.padding):
            spread.register_hook(functools.partial(_require_unread, self.padding))  # type: ignore[no-untyped-call]
        return spread


def _require_unread(padding: torch.Tensor, gradient: torch.Tensor) -> None:
    """Raise if a gradient comes to hidden states of padding. Overflow, which a gradient scaler skips, says nothing."""
    found = gradient.index_select(0, padding.to(gradient.device))
    device.require(
        ~(found.isfinite() & (found != 0)).any(),
        PackingNotIsolated,
        "a loss depends on hidden states of padding. This padded batch was computed packed, so that padding has none "
        "(zeros), and the loss is not that of padded training. Leave padding out of the loss: give -100 to labels on "
        "padding and, in rows that are padded on the left, to the first token's label; mask what pools a row. Or let "
        "padding be computed: fa2patch.apply(model, padded_batches=False), or fa2patch.revert(model).",
    )


def packed_row(
    shape: torch.Size, starts: NDArray[Any], lengths: NDArray[Any], rows: Segments, place: torch.device
) -> tuple[Call, Layout]:
    """Make the layout of a packed row, and the arguments that describe the row to a patched model.

    Args:
        shape: ``(batch, length)`` of the padded batch.
        starts: the column of each row's first real token.
        lengths: each row's number of real tokens.
        rows: the segments of the packed row.
        place: the device of the tensors.

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
    numbers.append(np.setdiff1d(np.arange(shape[0] * shape[1]), numbers[2 if rows.shared else 0], assume_unique=True))
    cells, position_ids, *both, padding = torch.split(
        torch.from_numpy(np.concatenate(numbers)).to(place), [len(each) for each in numbers]
    )
    ends = torch.tensor(cu, dtype=torch.int32).to(place)
    call: Call = {"position_ids": position_ids[None], "cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    call.update(max_length_q=max(counts), max_length_k=max(counts))
    if any(each.parent >= 0 for each in segments):
        call[PARENTS] = torch.tensor([each.parent for each in segments], dtype=torch.int32).to(place)
    of_cells, token = both or (cells, None)
    return call, Layout(shape, cells, of_cells, padding, token)


def _tokens(rows: Segments, row: int, length: int, cu: list[int]) -> NDArray[Any]:
    """The tokens of the packed row that are a row's tokens, in their order."""
    on_path = [(cu[number], rows.segments[number]) for number in rows.path(row)]
    return np.concatenate([at + np.arange(min(each.stop, length) - each.start) for at, each in on_path])
