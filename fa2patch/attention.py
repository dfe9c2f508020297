"""``packed_attention``: boundaries -> kernel. Every packed token goes through here, whatever the seam."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import kernels
from .boundaries import Boundaries
from .errors import PackingNotIsolated


@dataclass(frozen=True)
class Options:
    """What a layer asks of its attention, besides q, k and v.

    Attributes:
        scale: factor of the logits; None means ``head_dim ** -0.5``.
        causal: a query sees no later key.
        window: sliding window W: a query at i sees keys j with ``i - j < W``; None is no window. (As in eager
            attention and in Transformers' flash path since 4.56; up to 4.55 that path saw one token more.)
        softcap: ``softcap * tanh(logits / softcap)``; None is none.
        dropout: probability with which attention weights are dropped.
        sinks: ``[query heads]`` logits of a virtual key without a value (GPT-OSS), or None.
        alibi_slopes: float ``[query heads]``: ``-slope * (i - j)`` is added to the logits, or None.
    """

    scale: float | None = None
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    dropout: float = 0.0
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise PackingNotIsolated(
                f"a sliding window of {self.window} tokens shows a query nothing; None is no window."
            )


def packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    boundaries: Boundaries,
    options: Options,
    kernel: str = "auto",
) -> torch.Tensor:
    """Attention in which no token sees, or sends a gradient to, another document.

    Args:
        q: ``[batch, length, query heads, head dim]``.
        k: ``[batch, length, key heads, head dim]``; key heads divide query heads.
        v: ``[batch, length, key heads, value head dim]``. All three of one dtype.
        boundaries: documents over the ``batch * length`` tokens.
        options: scale, window and so on.
        kernel: ``"auto"`` or a kernel's name.

    Returns:
        ``[batch, length, query heads, value head dim]``, contiguous, of q's dtype.

    Raises:
        PackingNotIsolated: queries and keys are not the same tokens (a key/value cache holds others), or their heads do
            not fit.
        UnknownKernel, KernelUnavailable: see :func:`fa2patch.kernels.choose`.
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
    chosen = kernels.choose(kernel, q, v, options)
    rows = q.shape[:2]
    output = chosen(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), boundaries, options)
    return output.view(*rows, q.shape[2], v.shape[3])
