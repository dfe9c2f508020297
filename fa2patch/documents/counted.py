"""Documents of a batch that holds nothing but position ids on one axis: no mask, no ``seq_idx``.

A collator gives such a batch, so most batches are of this kind. A document starts at the first token of every row and
wherever an id is not its left neighbour's plus one. On a CPU, NumPy looks for these tokens. On other devices, the
device does so, and the host reads four numbers, whatever the length of the rows. In a compiled graph it is one
operator (``fa2patch::documents``), from torch 2.4 on. With older versions the graph breaks.
"""

from __future__ import annotations

from typing import Callable

import numpy as np
import torch

from .._torch import HAS_OPERATORS, unbacked_size
from . import device as devices
from .boundaries import Boundaries, from_starts
from .checks import require_no_wrap
from .starts import behind_padding


def is_plain(
    position_ids: torch.Tensor | None, attention_mask: torch.Tensor | None, seq_idx: torch.Tensor | None
) -> bool:
    """Whether position ids on one axis are all that a batch says of its documents."""
    if position_ids is None or attention_mask is not None or seq_idx is not None:
        return False
    return position_ids.dim() < 3 or position_ids.shape[0] == 1


def documents_of(ids: torch.Tensor, device: torch.device, always: bool, first_position: int = 0) -> Boundaries | None:
    """Find the boundaries of the documents, with one read from the device; two if ids in a packed row are padding.

    Args:
        ids: position ids, integers ``[batch, length]``.
        device: the device of the returned ``cu_seqlens``.
        always: whether to return boundaries also if every row is one document.
        first_position: the position id of a document's first token. Lower ids of a packed row may be padding.

    Raises:
        BadPositionIds: documents may be longer than the ids' dtype can count.
    """
    dtype = ids.dtype
    ids = ids.detach().to(device, torch.int64)
    if device.type == "cpu":
        numbers = devices.read(ids)
        starts = np.ones(numbers.shape, dtype=bool)
        starts[:, 1:] = (numbers[:, 1:] != numbers[:, :-1] + 1) | (numbers[:, 1:] <= numbers[:, :-1])  # int64 wraps
        packed, last = np.count_nonzero(starts) > len(starts), int(numbers.max())
        if packed and numbers.min() < first_position:
            starts[:, 1:] |= behind_padding(numbers[:, 1:], numbers[:, :-1], starts[:, :-1], first_position)
        made = from_starts(starts, device, last + 1) if packed or always else None
        if made is not None and packed:
            require_no_wrap(dtype, last, made.max_seqlen + first_position)
        return made
    ends, found = _on_device(ids)
    documents, longest, least, last = devices.read(found).tolist()
    packed = documents > ids.shape[0]
    if packed:
        require_no_wrap(dtype, last, longest + first_position)
    if packed and least < first_position:  # so few batches have such ids that another read costs less than looking
        ends, found = _on_device(ids, first_position)
        documents, longest, *_ = devices.read(found).tolist()
    return Boundaries(ends[: documents + 1], longest, last + 1) if packed or always else None


def _on_device(ids: torch.Tensor, first_position: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the documents without a read.

    Args:
        ids: int64 ``[batch, length]``.
        first_position: the position id of a document's first token, for :func:`.starts.behind_padding`; None if no id
            is below it.

    Returns:
        int32 ``[tokens + 1]``, the documents' ends, the last of which is repeated; and int64 ``[4]``: the number of
        documents, the longest document's length, the smallest and the largest id.
    """
    tokens = ids.numel()
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[:, 1:] = (ids.diff() != 1) | (ids[:, 1:] <= ids[:, :-1])
    if first_position is not None:
        starts[:, 1:] |= behind_padding(ids[:, 1:], ids[:, :-1], starts[:, :-1], first_position)
    number = starts.flatten().cumsum(0)
    token = torch.arange(tokens, device=ids.device)
    ends = torch.full((tokens + 2,), tokens, device=ids.device)
    ends = ends.scatter(0, torch.where(starts.flatten(), number - 1, tokens + 1), token)[:-1]  # others to a place apart
    return ends.to(torch.int32), torch.stack([number[-1], ends.diff().max(), *torch.aminmax(ids)])


in_graph: Callable[[torch.Tensor, int], Boundaries] | None = None
"""The boundaries of the documents of position ids ``[batch, length]`` in a graph being captured; None before torch 2.4.

It is called with the ids and the position id of a document's first token. The number of documents and the longest
length are sizes that the graph does not know. ``positions`` is None.
"""

if HAS_OPERATORS:

    @torch.library.custom_op(
        "fa2patch::documents",
        mutates_args=(),
        schema="(Tensor position_ids, int first_position=0) -> (Tensor cu_seqlens, Tensor longest)",
    )
    def _documents(position_ids: torch.Tensor, first_position: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``cu_seqlens`` and an empty tensor ``[max_seqlen, 0]``: a size need not be read from a tensor."""
        found = documents_of(position_ids, position_ids.device, True, first_position)
        assert found is not None, "it is asked for always"
        cu = found.cu_seqlens.clone()
        return cu, cu.new_empty(found.max_seqlen, 0)

    @_documents.register_fake
    def _(position_ids: torch.Tensor, first_position: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        cu = position_ids.new_empty(unbacked_size(2), dtype=torch.int32)
        return cu, cu.new_empty(unbacked_size(1), 0)

    def _in_graph(position_ids: torch.Tensor, first_position: int) -> Boundaries:
        cu, longest = _documents(position_ids, first_position)
        return Boundaries(cu, longest.shape[0], uncounted=True)

    in_graph = _in_graph
