"""``packed_attention``, which every seam for attention calls with the boundaries, and which calls the kernel."""

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
    """Compute attention in which no token sees, or sends a gradient to, another document.

    Args:
        q: ``[batch, length, query heads, head dim]``.
        k: ``[batch, length, key heads, head dim]``; key heads divide query heads.
        v: ``[batch, length, key heads, value head dim]``. q, k and v have one dtype.
        boundaries: boundaries of the documents over the ``batch * length`` tokens.
        options: scale, window and so on.
        kernel: ``"auto"``, the name of a kernel, or a kernel.

    Returns:
        A contiguous tensor ``[batch, length, query heads, value head dim]`` of q's dtype.

    Raises:
        PackingNotIsolated: q, k and v differ in batch or length (a key/value cache holds other tokens), or their
            numbers of heads do not fit.
        UnknownKernel: no kernel has this name.
        KernelUnavailable: the kernel cannot compute this (:class:`KernelWrong`: it fails its trial).
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
        asked = kernels.asked_by(q, k, v, options, boundaries.parents is not None, boundaries.until is not None)
        kernel = kernels.pick(kernel, asked, q.device).kernel
    rows = q.shape[:2]
    if q.is_meta:
        return q.new_empty(*rows, q.shape[2], v.shape[3])
    output = kernel(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), boundaries, options)
    return output.view(*rows, q.shape[2], v.shape[3])
