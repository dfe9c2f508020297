"""The paths of a tree of segments as an operator (``fa2patch::paths``), so that a compiled model has no graph break.

This needs ``torch.library.custom_op``, which torch has from 2.4 on. With older versions the graph breaks.
"""

from __future__ import annotations

from typing import Callable

import numpy as np
import torch

from .._compile import unbacked_size, uncompiled
from . import device
from .trees import Tree

Paths = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@uncompiled
def _made(cu_seqlens: torch.Tensor, parents: torch.Tensor, tokens: int) -> Paths:
    cu, numbers = np.split(device.read(torch.cat([cu_seqlens, parents])), [cu_seqlens.shape[0]])
    tree = Tree(np.diff(cu).tolist(), numbers.tolist(), cu_seqlens.device)
    return (*tree.keys[:2], tree.positions)


paths: Callable[[torch.Tensor, torch.Tensor, int], Paths] = _made
"""Called as ``paths(cu_seqlens, parents, tokens)``, with int32 ``[segments + 1]``, int32 ``[segments]`` and the number
of tokens. Returns ``Tree.keys`` without the longest length, and ``Tree.positions``. It reads from the device once."""

if hasattr(torch.library, "custom_op"):
    paths = torch.library.custom_op(
        "fa2patch::paths",
        _made,
        mutates_args=(),
        schema="(Tensor cu_seqlens, Tensor parents, SymInt tokens) -> (Tensor, Tensor, Tensor)",
    )

    @paths.register_fake
    def _(cu_seqlens: torch.Tensor, parents: torch.Tensor, tokens: int) -> Paths:
        keys = unbacked_size(0)
        whole = cu_seqlens.new_empty(keys, dtype=torch.int64)
        return whole, torch.empty_like(cu_seqlens), cu_seqlens.new_empty(tokens, dtype=torch.int64)
