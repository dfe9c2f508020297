"""The document of each token, from where documents end."""

from __future__ import annotations

import torch


def document_of(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """The number of each token's document, int64 ``[tokens]``. Nothing is read from the device.

    Args:
        cu_seqlens: integers ``[documents + 1]``: 0, then the end of every document.
        tokens: the number of tokens.
    """
    token = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens, token, right=True) - 1
