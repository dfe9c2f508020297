"""The options of an attention layer besides q, k and v."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import PackingNotIsolated


@dataclass(frozen=True)
class Options:
    """The options of an attention layer besides q, k and v.

    Attributes:
        scale: factor of the logits; None means ``head_dim ** -0.5``.
        causal: whether a query sees no later key.
        window: sliding window W in tokens: a query at i sees only keys j with ``|i - j| < W``. None is no window. (As
            in eager attention and in Transformers' flash path since 4.56; up to 4.55 that path saw one token more.)
        softcap: logits become ``softcap * tanh(logits / softcap)``; None leaves them unchanged.
        dropout: probability with which attention weights are dropped.
        sinks: ``[query heads]`` logits of a virtual key without a value (GPT-OSS), or None.
        alibi_slopes: float ``[query heads]``; ``-slope * |i - j|`` is added to the logits. None adds nothing.

    Raises:
        PackingNotIsolated: ``window`` is less than 1.
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
