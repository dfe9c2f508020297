"""FlexAttention (``torch.nn.attention.flex_attention``, from torch 2.5 on).

It offers softcap and alibi if flash-attn is not installed, and T5's bias, which no other kernel of a GPU has. Triton
compiles it at the first call, which takes seconds, so ``auto`` tries it after the other GPU kernels.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache, lru_cache
from types import FunctionType
from typing import Any, Callable

import torch

from .._torch import constant, uncompiled
from ..documents.boundaries import Boundaries, document_of
from .options import Options
from .protocol import AMD, HALF, IN_32_BITS, INTEL, NVIDIA, OLDER_NVIDIA, Asked, Kernel


class Flex(Kernel):
    # One block mask is made per batch and kind of layer, without a ``[tokens, tokens]`` tensor.

    name = "flex"
    what = "FlexAttention"
    needs = "torch 2.5 and Triton (XPU: torch 2.9; bias: torch 2.6)"
    DEVICES = ("cuda", "xpu")
    DTYPES = (*HALF, torch.float32)
    RUNS_ON = (NVIDIA, OLDER_NVIDIA, AMD, INTEL)
    FEATURES = frozenset({"window", "softcap", "sinks", "alibi", "bias", "deterministic", "trees", "spans", "pairs"})
    GATHERS = False
    MASKS = True
    LARGEST = IN_32_BITS  # Triton multiplies a token's number and a stride in 32 bits if both are small

    def available(self) -> tuple[bool, str]:
        return _runs()

    def features(self) -> frozenset[str]:
        return self.FEATURES if _differentiates_captured() else self.FEATURES - {"bias"}

    def supports(self, asked: Asked) -> tuple[bool, str]:
        if {"bias", "deterministic"} <= {*asked.features}:
            return False, "its gradients of a bias are added up in any order"
        return super().supports(asked)

    def takes(self, head_dim: int, value_dim: int) -> bool:
        # torch 2.5 takes no larger head dimension of v.
        return value_dim <= head_dim or not _takes_powers_only()

    def rounded(self, dim: int) -> int:
        # torch takes head dimensions from 16 on, and before 2.8 only powers of two.
        dim = max(dim, 16)
        return 1 << (dim - 1).bit_length() if _takes_powers_only() else super().rounded(dim)

    @uncompiled
    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, boundaries: Boundaries, options: Options, scale: float
    ) -> torch.Tensor:
        layout = (
            q.device,
            options.causal,
            options.window,
            boundaries.parents is None,
            boundaries.until is None,
            boundaries.sources is None,
        )
        states = (q.dtype, *q.shape[1:], *v.shape[1:], torch.is_grad_enabled(), scale, options.softcap)
        bias = options.bias
        without = (
            options.alibi_slopes is None,
            options.sinks is None,
            bias is None or (bias.dtype, bias.requires_grad),
        )
        flex = _compiled("flex_attention", (*layout, *states, *without))
        return compute(flex, _compiled("create_block_mask", layout), q, k, v, boundaries, options, scale)


@lru_cache(maxsize=1)
def _runs() -> tuple[bool, str]:
    found = importlib.util.find_spec("torch.nn.attention")  # torch 2.1 has no such package
    if found is None or importlib.util.find_spec("torch.nn.attention.flex_attention") is None:
        return False, f"torch {torch.__version__} has no FlexAttention"
    if not torch.cuda.is_available() and not (hasattr(torch, "xpu") and torch.xpu.is_available()):
        return False, "torch finds no CUDA or XPU device"
    return (True, "") if importlib.util.find_spec("triton") else (False, "the package triton is not installed")


@constant
def _differentiates_captured() -> bool:
    # torch 2.6 has learned to differentiate the tensors that a score refers to, and adds the gradients up by this.
    return hasattr(importlib.import_module("torch._dynamo._trace_wrapped_higher_order_op"), "ModIndex")


@constant
def _takes_powers_only() -> bool:
    return hasattr(importlib.import_module("torch.nn.attention.flex_attention"), "_supported_head_dim")


@cache
def _compiled(name: str, kind: tuple[Any, ...]) -> Callable[..., Any]:
    # Dynamo compiles one code object for eight kinds of calls at most, and then runs it uncompiled, with a score for
    # every two tokens of the row. So each kind has a code object of its own, and calls of one kind differ in lengths
    # only.
    function = getattr(importlib.import_module("torch.nn.attention.flex_attention"), name)

    def call(*given: Any, **more: Any) -> Any:
        return function(*given, **more)

    code = call.__code__.replace(co_name=f"{name}_{_compiled.cache_info().misses}")
    return torch.compile(FunctionType(code, call.__globals__, name, None, call.__closure__))


def compute(
    flex: Callable[..., Any], create_block_mask: Callable[..., Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    boundaries: Boundaries, options: Options, scale: float,
) -> torch.Tensor:  # fmt: skip
    kind = ("flex", options.causal, options.window)
    if kind not in boundaries.made:
        tokens, device = q.shape[0], q.device
        visible = _visible(boundaries, tokens, k.shape[0], options.causal, options.window)
        boundaries.made[kind] = create_block_mask(visible, None, None, tokens, k.shape[0], device)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    asked = {
        "score_mod": _scored(options, boundaries, q.shape[2], k.shape[2]),
        "block_mask": boundaries.made[kind],
        "scale": scale,
        "enable_gqa": q.shape[1] != k.shape[1],
    }
    if options.sinks is None:
        output = flex(q, k, v, **asked)
    else:
        # torch 2.9 has replaced the argument that asks for the log-sum-exp
        request = getattr(importlib.import_module("torch.nn.attention.flex_attention"), "AuxRequest", None)
        asked |= {"return_lse": True} if request is None else {"return_aux": request(lse=True)}
        output, found = flex(q, k, v, **asked)
        lse = found if request is None else found.lse
        output = (output * torch.sigmoid(lse - options.sinks.to(lse.dtype)[:, None])[..., None]).to(output.dtype)
    attended: torch.Tensor = output.squeeze(0).transpose(0, 1)  # the derivative of [0] would write zeros, then a copy
    return attended.contiguous()


def _visible(
    boundaries: Boundaries, tokens: int, keys: int, causal: bool, window: int | None
) -> Callable[..., torch.Tensor]:
    cu, tree, until = boundaries.cu_seqlens, boundaries.tree, boundaries.until
    document = of_keys = document_of(cu, tokens)
    position = torch.arange(tokens, device=cu.device, dtype=cu.dtype) if tree is None else tree.positions
    of_key = position
    continues = None if tree is None else tree.continues
    if boundaries.sources is not None:
        of_keys = document_of(boundaries.sources.cu_seqlens, keys)
        if causal or window is not None:
            position, of_key = _positions(boundaries, tokens, keys, causal)

    def visible(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        seen = document[query] == of_keys[key] if continues is None else continues[document[query], document[key]]
        if causal and until is not None:
            seen = seen & (until[query] >= key)
        elif causal:
            seen = seen & (position[query] >= of_key[key])
        if window is not None:
            seen = seen & ((position[query] - of_key[key]).abs() < window)
        return seen

    return visible


def _scored(options: Options, boundaries: Boundaries, tokens: int, keys: int) -> Callable[..., torch.Tensor] | None:
    softcap, alibi_slopes, bias = options.softcap, options.alibi_slopes, options.bias
    if softcap is None and alibi_slopes is None and bias is None:
        return None
    position, of_key = _positions(boundaries, tokens, keys, options.causal)
    if bias is not None and bias.requires_grad:
        # In float32, because the gradients of all documents are added up; and a copy, because a compiled graph of torch
        # 2.13 gives a view that a score refers to no gradient, and raises nothing.
        bias = bias.to(torch.float32, copy=True)

    def scored(
        score: torch.Tensor, batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if bias is not None:
            score = score + bias[head, position[query], of_key[key]]
        if alibi_slopes is not None:
            score = score - alibi_slopes[head] * (position[query] - of_key[key]).abs()
        return score

    return scored


def _positions(boundaries: Boundaries, tokens: int, keys: int, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    # of the queries and of the keys in their documents, int64; made once in a forward
    kind = _positions, causal
    if kind not in boundaries.made:
        own, sources = boundaries.positions_of((1, tokens))[0], boundaries.sources
        of_key = own if sources is None else sources.positions_of((1, keys))[0]
        if sources is not None and causal:  # a document's last query is at its last key
            more = (sources.cu_seqlens.diff() - boundaries.cu_seqlens.diff()).long()
            own = own + more[document_of(boundaries.cu_seqlens, tokens)]
        boundaries.made[kind] = own, of_key
    found: tuple[torch.Tensor, torch.Tensor] = boundaries.made[kind]
    return found
