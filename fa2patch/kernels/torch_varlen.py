"""torch's own build of FlashAttention 2: the aten operator that ``scaled_dot_product_attention`` uses.

Nothing has to be installed. The operator is used instead of ``torch.nn.attention.varlen``, whose signature changes in
almost every release, while a call with the arguments of torch 2.4 works in all later releases. The operator's schema
shows what a release lacks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._torch import compiling
from ..documents.boundaries import Keys
from ..documents.starts import document_of
from .cascade import Cascade, Part, parts_of
from .protocol import Kernel

if TYPE_CHECKING:
    from ..documents.boundaries import Boundaries
    from .options import Options

_FORWARD, _BACKWARD = "_flash_attention_forward", "_flash_attention_backward"
_WINDOW = "window_size_left"


class TorchVarlen(Kernel):
    """torch's FlashAttention 2. Attention sinks and trees are computed from the log-sum-exp: see :mod:`.cascade`."""

    name = "torch_varlen"
    what = "FlashAttention 2, torch's own build"
    needs = "nothing (windows and sinks: torch 2.4)"
    FEATURES = frozenset({"window", "sinks", "dropout", "deterministic", "trees", "spans"})
    GATHERS = False

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
        """Call the operator. Sinks, and trees without a window, go through :class:`~.cascade.Cascade`."""
        keys, tree = boundaries.keys(q.shape[0]), boundaries.parents is not None
        gathers = tree and (options.window is not None or compiling())  # a graph holds no tree of the host
        if gathers and keys.tokens is not None:
            k, v = k.index_select(0, keys.tokens), v.index_select(0, keys.tokens)
        elif tree:
            keys = Keys(None, boundaries.cu_seqlens, boundaries.max_seqlen)
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        more: dict[str, Any] = {"scale": scale}
        if options.window is not None:
            reach = options.window - 1
            more.update({_WINDOW: reach, "window_size_right": 0 if options.causal else reach})
        operator = _Operator(keys.cu_seqlens, keys.max_seqlen, options.dropout, more)
        own = Part(slice(None), boundaries.cu_seqlens, boundaries.max_seqlen, (), options.causal)
        if options.sinks is None and (gathers or not tree):
            return operator.call(q, k, v, own)[0]
        parts = parts_of(boundaries) if tree and not gathers else [own]
        attended: torch.Tensor = Cascade.apply(q, k, v, options.sinks, parts, operator)  # type: ignore[no-untyped-call]
        return attended


class _Operator(NamedTuple):
    """The operator with its log-sum-exp, for :mod:`.cascade`.

    Attributes:
        cu_seqlens, max_seqlen: the ends of each segment's keys, and the largest number of them.
        dropout: the probability of dropout.
        more: keywords of the operator.
    """

    cu_seqlens: torch.Tensor
    max_seqlen: int
    dropout: float
    more: dict[str, Any]

    def call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Part) -> tuple[torch.Tensor, ...]:
        """Call the operator's forward, and return all of its outputs."""
        outputs: tuple[torch.Tensor, ...] = getattr(torch.ops.aten, _FORWARD).default(
            q, k, v, part.cu_seqlens, self.cu_seqlens, part.max_seqlen, self.max_seqlen, self.dropout, part.causal,
            False, **self.more,
        )  # fmt: skip
        return outputs

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Part) -> tuple[torch.Tensor, ...]:
        """Compute the output, the log-sum-exp ``[queries, heads]``, and the state that dropout repeats.

        The operator's log-sum-exp is ``[heads, queries]`` from torch 2.7 on. Before, and in builds for ROCm, it is
        padded, ``[segments, heads, max_seqlen]``. Such a one is kept for the backward, which takes it in that layout.
        """
        output, lse, state, unused, _ = self.call(q, k, v, part)
        if lse.dim() == 2:
            return output, lse.transpose(0, 1), state, unused
        segment, place = _places(part, q.shape[0])
        return output, lse[segment, :, place], state, unused, lse

    def backward(
        self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, output: torch.Tensor,
        lse: torch.Tensor, part: Part, kept: tuple[torch.Tensor, ...], of_keys: torch.Tensor, of_values: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Compute the gradient of q, and add those of k and v to ``of_keys`` and ``of_values``."""
        state, unused, *padded = kept
        if padded:
            segment, place = _places(part, q.shape[0])
            of_operator = padded[0].clone()
            of_operator[segment, :, place] = lse.to(of_operator.dtype)
        else:
            of_operator = lse.transpose(0, 1).contiguous()
        of_queries: torch.Tensor
        of_queries, keys, values = getattr(torch.ops.aten, _BACKWARD).default(
            grad, q, k, v, output, of_operator, part.cu_seqlens, self.cu_seqlens, part.max_seqlen, self.max_seqlen,
            self.dropout, part.causal, state, unused, **self.more,
        )  # fmt: skip
        of_keys += keys
        of_values += values
        return of_queries


def _places(part: Part, queries: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each query's segment, and its place in the segment: two int64 tensors ``[queries]``."""
    query = torch.arange(queries, device=part.cu_seqlens.device)
    segment = document_of(part.cu_seqlens, queries)
    return segment, query - part.cu_seqlens[segment]


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
