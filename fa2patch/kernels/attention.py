"""``packed_attention``: boundaries -> kernel. Every packed token goes through here, whatever the seam."""

from __future__ import annotations

import torch

from .. import kernels
from ..documents.boundaries import Boundaries
from ..errors import PackingNotIsolated
from .options import Options

__all__ = ["Options", "packed_attention"]


def packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    boundaries: Boundaries,
    options: Options,
    kernel: str | kernels.Kernel = "auto",
) -> torch.Tensor:
    """Attention in which no token sees, or sends a gradient to, another document.

    Args:
        q: ``[batch, length, query heads, head dim]``.
        k: ``[batch, length, key heads, head dim]``; key heads divide query heads.
        v: ``[batch, length, key heads, value head dim]``. All three of one dtype.
        boundaries: documents over the ``batch * length`` tokens.
        options: scale, window and so on.
        kernel: ``"auto"``, a kernel's name, or a kernel.

    Returns:
        ``[batch, length, query heads, value head dim]``, contiguous, of q's dtype.

    Raises:
        PackingNotIsolated: queries and keys are not the same tokens (a key/value cache holds others), or their heads do
            not fit.
        UnknownKernel, KernelUnavailable: see :func:`fa2patch.kernels.pick`.
    """
    if q.shape[:2] != k.shape[:2] or k.shape[:2] != v.shape[:2]:
        raise PackingNotIsolated(
            f"packed attention needs queries and keys of the same tokens; found {list(q.shape[:2])} queries and "
            f"{list(k.shape[:2])} keys [batch, length]. Pass no key/value cache with a packed batch."
        )
    if q.shape[2] % k.shape[2] or k.shape[2] != v.shape[2]:
        raise PackingNotIsolated(
            f"found {q.shape[2]} query, {k.shape[2]} key and {v.shape[2]} value heads: expected as many key as value "
            "heads, and a multiple of them as query heads."
        )
    if isinstance(kernel, str):
        kernel = kernels.pick(kernel, kernels.asked_by(q, k, v, options), q.device).kernel
    rows = q.shape[:2]
    if q.is_meta:
        return q.new_empty(*rows, q.shape[2], v.shape[3])
    output = kernel(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), boundaries, options)
    return output.view(*rows, q.shape[2], v.shape[3])
