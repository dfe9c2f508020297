"""torch's own build of FlashAttention 2: the aten operator that ``scaled_dot_product_attention`` uses.

Nothing has to be installed. The operator is used instead of ``torch.nn.attention.varlen``, whose signature changes in
almost every release, while a call with the arguments of torch 2.4 works in all later releases. The operator's schema
shows what a release lacks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from .protocol import Kernel

if TYPE_CHECKING:
    from ..documents.boundaries import Boundaries
    from .options import Options

_FORWARD, _BACKWARD = "_flash_attention_forward", "_flash_attention_backward"
_WINDOW = "window_size_left"


class TorchVarlen(Kernel):
    """torch's FlashAttention 2. Attention sinks are computed from the log-sum-exp: see :class:`_WithSinks`."""

    name = "torch_varlen"
    what = "FlashAttention 2, torch's own build"
    needs = "nothing (windows and sinks: torch 2.4)"
    FEATURES = frozenset({"window", "sinks", "dropout", "deterministic"})

    def available(self) -> tuple[bool, str]:
        """Whether torch has the operator and a suitable GPU, and the reason if not."""
        return _available()

    def features(self) -> frozenset[str]:
        """Without windows and sinks if the operator takes no window."""
        return self.FEATURES if _WINDOW in _arguments(_FORWARD) else self.FEATURES - {"window", "sinks"}

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        boundaries: Boundaries,
        options: Options,
        scale: float,
    ) -> torch.Tensor:
        """Call the operator, with sinks through :class:`_WithSinks`."""
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        window: dict[str, Any] = {}
        if options.window is not None:
            reach = options.window - 1
            window = {_WINDOW: reach, "window_size_right": 0 if options.causal else reach}
        about = (boundaries.cu_seqlens, boundaries.max_seqlen, options.dropout, options.causal)
        if options.sinks is not None:
            attended: torch.Tensor = _WithSinks.apply(  # type: ignore[no-untyped-call]
                q, k, v, options.sinks, *about, {"scale": scale, **window}
            )
            return attended
        output: torch.Tensor = _forward(q, k, v, *about, scale=scale, **window)[0]
        return output


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor, longest: int, dropout: float, causal: bool,
    **more: Any,
) -> Any:  # fmt: skip
    operator = getattr(torch.ops.aten, _FORWARD).default
    return operator(q, k, v, cu, cu, longest, longest, dropout, causal, False, **more)


class _WithSinks(torch.autograd.Function):
    """Attention sinks with a kernel that has none. A sink is a key without a value, with one logit for each head.

    The sink only enters the softmax's sum. Let ``l`` be the log-sum-exp without it and ``l2 = logaddexp(l, sink)``.
    The output is the kernel's output times ``exp(l - l2)``. The kernel's backward, called with this output and ``l2``,
    gives the gradients of q, k and v. The sink's gradient is ``-sum over tokens of exp(sink - l2) * (grad . output)``.
    """

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, cu: torch.Tensor,
        longest: int, dropout: float, causal: bool, more: dict[str, Any],
    ) -> torch.Tensor:  # fmt: skip
        output, lse, state, unused, _ = _forward(q, k, v, cu, longest, dropout, causal, **more)
        with_sink = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
        smaller = (lse - with_sink).exp().transpose(0, 1)[..., None]
        output_with_sink: torch.Tensor = (output * smaller).to(output.dtype)
        ctx.save_for_backward(q, k, v, sinks, cu, output_with_sink, with_sink, state, unused)
        ctx.about = (longest, dropout, causal, more)
        return output_with_sink

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, cu, output, with_sink, state, unused = ctx.saved_tensors
        longest, dropout, causal, more = ctx.about
        operator = getattr(torch.ops.aten, _BACKWARD).default
        grads = operator(
            grad, q, k, v, output, with_sink, cu, cu, longest, longest, dropout, causal, state, unused, **more
        )
        drawn = (grad.to(with_sink.dtype) * output).sum(-1).transpose(0, 1)
        of_sinks = -((sinks.to(with_sink.dtype)[:, None] - with_sink).exp() * drawn).sum(-1)
        return (*grads, of_sinks.to(sinks.dtype), None, None, None, None, None)


@lru_cache(maxsize=2)
def _arguments(operator: str) -> frozenset[str]:
    found = getattr(torch.ops.aten, operator, None)
    return frozenset() if found is None else frozenset(argument.name for argument in found.default._schema.arguments)


@lru_cache(maxsize=1)
def _available() -> tuple[bool, str]:
    if not {"cum_seq_q", "max_q"} <= _arguments(_FORWARD):
        return False, f"torch {torch.__version__} has no {_FORWARD} with cu_seqlens"
    if not torch.cuda.is_available():
        return False, "torch finds no CUDA device"
    if torch.version.hip is None and torch.cuda.get_device_capability() < (8, 0):
        return False, f"{torch.cuda.get_device_name()} is older than Ampere"
    asked = getattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    return (True, "") if asked() else (False, "this torch was built without flash attention")
