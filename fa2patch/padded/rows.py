"""The rows of a padded batch, and where their tokens are in the packed row that is computed in its place."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from .._types import Call
from ..documents import tensors
from ..documents.find import counts_anew
from ..documents.names import PARENTS, stated
from ..documents.prefixes import LEAST, Prefixes, Segment, prefix_tree
from ..errors import PackingNotIsolated

AT_ONCE = 2**24  # the number of pairs of tokens that are compared at once, which bounds the memory


class Rows(NamedTuple):
    starts: NDArray[Any]  # the column of each row's first real token
    lengths: NDArray[Any]  # each row's number of real tokens, at least 1
    answers: tuple[bool, ...]  # to what else was asked of the batch
    # in how many first columns two rows are equal, from their first real tokens on; None if they were not compared
    common: NDArray[Any] | None


def read_rows(
    mask: torch.Tensor,
    position_ids: torch.Tensor | None,
    compared: Sequence[torch.Tensor],  # integers [batch, length] each
    asked: Sequence[torch.Tensor] = (),  # bool tensors without dimensions that are read together with the rows
) -> Rows | None:
    # There is one read from the device. The result is None for a batch that is not padded with a mask of zeros and
    # ones, or whose position ids do not go on by one inside a row's real tokens.
    rows, length = mask.shape
    real = mask != 0
    starts, lengths = real.to(torch.uint8).argmax(1), real.sum(1)
    column = torch.arange(length, device=mask.device)
    inside = (column >= starts[:, None]) & (column < (starts + lengths)[:, None])
    plain = (real == inside).all() & ((mask == 1) == real).all() & (lengths > 0).all()
    if position_ids is not None:
        ids = position_ids.to(mask.device)
        plain &= ~(counts_anew(ids[:, 1:], ids[:, :-1]) & real[:, 1:] & real[:, :-1]).any()
    parts = [starts, lengths, plain[None], *(each.to(mask.device)[None] for each in asked)]
    if compared:
        aligned = (column + starts[:, None]) % length
        parts.append(common_prefixes([value.to(mask.device).gather(1, aligned) for value in compared]).flatten())
    read = tensors.read(torch.cat([part.to(torch.int32) for part in parts]))
    behind = 2 * rows + 1
    of_starts, of_lengths, holds, answers, common = np.split(read, [rows, 2 * rows, behind, behind + len(asked)])
    if not holds[0]:
        return None
    shared = common.reshape(rows, rows) if compared else None
    return Rows(of_starts, of_lengths, tuple(map(bool, answers)), shared)


def common_prefixes(columns: Sequence[torch.Tensor]) -> torch.Tensor:
    # The result is int32 [rows, rows]. Nothing is read from the device.
    rows, length = columns[0].shape
    step = max(1, AT_ONCE // (rows * length))
    found = []
    for at in range(0, rows, step):
        differ = columns[0].new_zeros((min(step, rows - at), rows, length + 1), dtype=torch.bool)
        differ[..., length] = True  # equal rows differ first behind their last column
        for column in columns:
            differ[..., :length] |= column[at : at + step, None] != column[None]
        found.append(differ.to(torch.uint8).argmax(-1))  # of several largest values, the first
    return torch.cat(found).to(torch.int32)


def shared_prefixes(common: NDArray[Any], lengths: NDArray[Any], least: int = LEAST) -> Prefixes:
    # `common` may count columns behind a row's tokens, so it is cut to the rows' lengths.
    common = np.minimum(common, np.minimum(lengths[:, None], lengths))
    order, shared, left = [0], [0], common.copy()
    while len(order) < len(lengths):  # next to each row stands the one that begins most like it
        left[:, order[-1]] = -1
        order.append(int(left[order[-1]].argmax()))
        shared.append(int(common[order[-2], order[-1]]))
    return prefix_tree(lengths.tolist(), zip(order, shared), order, least)


def unshared(lengths: Sequence[int]) -> Prefixes:
    return Prefixes([Segment(row, 0, length, -1) for row, length in enumerate(lengths)], list(range(len(lengths))))


@dataclass(frozen=True)
class Layout:
    """The places of a padded batch's tokens in a packed row."""

    # All tensors are int64. A cell is an index into the flattened [batch * length].
    shape: torch.Size  # (batch, length)
    at: torch.Tensor  # [tokens]: a cell for each token of the packed row
    cells: torch.Tensor  # [real tokens]: all cells of real tokens, of which several may share a token
    padding: torch.Tensor  # the cells of padding
    token: torch.Tensor | None  # [real tokens]: the token of the packed row that each is; None if cells is at

    def packed(self, value: torch.Tensor) -> torch.Tensor:
        # [batch, length, ...] becomes [1, tokens, ...].
        return value.flatten(0, 1)[self.at.to(value.device)][None]

    def padded(self, value: Any, noise: bool = False) -> Any:
        # Padding gets zeros or, in a trial of the head, random numbers. Where it gets zeros, a gradient there is an
        # error.
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
        # [tokens, ...] becomes [batch * length, ...].
        empty = states.new_zeros(self.shape[0] * self.shape[1], *states.shape[1:])
        if noise and states.is_floating_point():  # beyond every real value, so that a maximum over the row shows too
            drawn = torch.rand(empty.shape, generator=torch.Generator().manual_seed(0)) * 4 - 2
            empty = drawn.to(states) * states.detach().abs().max()
        of_cells = states if self.token is None else states.index_select(0, self.token.to(states.device))
        spread = empty.index_copy(0, self.cells.to(states.device), of_cells)
        if spread.requires_grad and len(self.padding):
            spread.register_hook(functools.partial(_require_unread, self.padding))  # type: ignore[no-untyped-call]
        return spread


def _require_unread(padding: torch.Tensor, gradient: torch.Tensor | None) -> None:
    # Only finite gradients count: an overflow, which a gradient scaler skips, says nothing about padding.
    if gradient is None:  # a loss that differentiates by itself (Liger's) sends none
        return
    found = gradient.index_select(0, padding.to(gradient.device))
    tensors.require(
        ~(found.isfinite() & (found != 0)).any(),
        PackingNotIsolated,
        "a loss depends on hidden states of padding. This padded batch was computed packed, so that padding has none "
        "(zeros), and the loss is not that of padded training. Leave padding out of the loss: give -100 to labels on "
        "padding and, in rows that are padded on the left, to the first token's label; mask what pools a row. Or let "
        "padding be computed: fa2patch.apply(model, padded_batches=False), or fa2patch.revert(model).",
    )


def packed_row(shape: torch.Size, rows: Rows, prefixes: Prefixes, place: torch.device) -> tuple[Call, Layout]:
    tree = prefixes.tree
    first = rows.starts + shape[1] * np.arange(shape[0])
    at = np.concatenate([first[each.sequence] + np.arange(each.start, each.stop) for each in prefixes.segments])
    real, shared = at, []
    if prefixes.shared:
        real = np.concatenate([start + np.arange(length) for start, length in zip(first, rows.lengths)])
        shared = [torch.from_numpy(real), prefixes.places(rows.lengths.tolist())]
    padding = np.setdiff1d(np.arange(shape[0] * shape[1]), real, assume_unique=True)
    numbers = [torch.from_numpy(at), tree.positions, torch.from_numpy(padding), *shared]
    on_device = tensors.to_device(torch.cat(numbers), place)
    of_row, position_ids, of_padding, *both = torch.split(on_device, [len(each) for each in numbers])
    cells, token = both or (of_row, None)
    cu = tensors.ends_of(tree.lengths, place)
    call: Call = {"position_ids": position_ids[None], **stated(cu, max(tree.lengths))}
    if any(parent >= 0 for parent in tree.parents):
        call[PARENTS] = tensors.to_device(torch.tensor(tree.parents, dtype=torch.int32), place)
    return call, Layout(shape, of_row, cells, of_padding, token)
