"""fa2patch's GPU kernels for a dry run: their own code around the call, and fake functions where torch has none.

A fake function is an operator of torch that returns tensors of the right shape and computes nothing. A kernel is made
available by a subclass, so nothing is changed in fa2patch.
"""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any, Callable, NamedTuple

import torch

from fa2patch.kernels import flex as flex_module
from fa2patch.kernels.efficient import Efficient
from fa2patch.kernels.flash_attn import FlashAttn
from fa2patch.kernels.flash_attn_3 import FlashAttn3
from fa2patch.kernels.flash_attn_4 import FlashAttn4
from fa2patch.kernels.flex import Flex
from fa2patch.kernels.protocol import Kernel
from fa2patch.kernels.torch_varlen import TorchVarlen
from fa2patch.kernels.varlen_func import PARAMETERS, Found

from .dry_count import OF_STAND_INS

_library = torch.library.Library(OF_STAND_INS, "DEF")
_library.define("forward(Tensor q, Tensor k, Tensor v, Tensor[] more) -> (Tensor, Tensor)")
_library.define(
    "backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor[] more) -> (Tensor, Tensor, Tensor, Tensor[])"
)
_library.define("block_mask(Tensor cu) -> Tensor")


@torch.library.impl(_library, "forward", "Meta")
def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, more: list[torch.Tensor]) -> Any:
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.impl(_library, "backward", "Meta")
def _backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, more: list[torch.Tensor]) -> Any:
    return (*(torch.empty_like(x) for x in (q, k, v)), [torch.empty_like(x) for x in more])


@torch.library.impl(_library, "block_mask", "Meta")
def _block_mask(cu: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(cu)


class _Attention(torch.autograd.Function):
    """One operator forward and one backward, as the autograd functions of flash-attn and of FlexAttention."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> Any:
        more = [] if sinks is None else [sinks]
        ctx.save_for_backward(q, k, v, *more)
        return getattr(torch.ops, OF_STAND_INS).forward(q, k, v, more)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, of_lse: torch.Tensor) -> Any:
        q, k, v, *more = ctx.saved_tensors
        *found, of_more = getattr(torch.ops, OF_STAND_INS).backward(grad, q, k, v, more)
        return (*found, of_more[0] if of_more else None)


def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """``flash_attn_varlen_func``: q, k and v ``[tokens, heads, head dim]``, and the output in q's layout."""
    sinks = next((arguments[name] for name in PARAMETERS["sinks"] if name in arguments), None)
    output: torch.Tensor = _Attention.apply(q, k, v, sinks)[0]  # type: ignore[no-untyped-call]
    return output


def flex_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> Any:
    """``flex_attention``: q, k and v ``[1, heads, tokens, head dim]``. Its output has q's layout."""
    laid = [x.transpose(1, 2) for x in (q, k, v)]
    output, lse = (x.transpose(1, 2) for x in _Attention.apply(*laid, None))  # type: ignore[no-untyped-call]
    if arguments.get("return_aux"):  # from torch 2.9 on, in the place of return_lse
        return output, SimpleNamespace(lse=lse)
    return (output, lse) if arguments.get("return_lse") else output


def create_block_mask(visible: Callable[..., Any], batch: None, heads: None, queries: int, keys: int, on: Any) -> Any:
    """``create_block_mask``, compiled: one operator, made of the tensors that ``visible`` refers to."""
    held = [cell.cell_contents for cell in visible.__closure__ or ()]
    first = next(x for x in held if isinstance(x, torch.Tensor))
    return getattr(torch.ops, OF_STAND_INS).block_mask(first)


class Bare(NamedTuple):
    """A kernel of fa2patch, and the same computation called by hand.

    Attributes:
        kernel: the kernel, available.
        call: called as ``call(q, k, v, cu_seqlens, longest, scale)`` for documents without options.
    """

    kernel: Kernel
    call: Callable[..., torch.Tensor]


def _here(kernel: type[Kernel], **members: Any) -> Kernel:
    """An instance of a kernel that says it is available."""
    made: Kernel = type(kernel.__name__, (kernel,), {"available": lambda self: (True, ""), **members})()
    return made


def _of_entry(kernel: type[Kernel]) -> Bare:
    names = {PARAMETERS[feature][0] for feature in kernel.FEATURES if feature in PARAMETERS}
    return Bare(
        _here(kernel, found=lambda self: Found(varlen, frozenset(names))),
        lambda q, k, v, cu, longest, scale: varlen(q, k, v),
    )


def _flash(q: Any, k: Any, v: Any, cu: Any, longest: int, scale: float) -> Any:
    operator = torch.ops.aten._flash_attention_forward.default
    return operator(q, k, v, cu, cu, longest, longest, 0.0, True, False, scale=scale)[0]


def _efficient(q: Any, k: Any, v: Any, cu: Any, longest: int, scale: float) -> Any:
    operator = torch.ops.aten._efficient_attention_forward.default
    output = operator(q[None], k[None], v[None], None, cu, cu, longest, longest, 0.0, 1, True, scale=scale)[0]
    return output.squeeze(0)


def _flex(q: Any, k: Any, v: Any, cu: Any, longest: int, scale: float) -> Any:
    return flex_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)))


def _attend(self: Flex, *given: Any) -> torch.Tensor:
    return flex_module.compute(flex_attention, create_block_mask, *given)


def kernels() -> dict[str, Bare]:
    """The kernels that ``auto`` tries on a GPU, by name and best first."""
    made = [_of_entry(kernel) for kernel in (FlashAttn3, FlashAttn, FlashAttn4)]
    made += [Bare(_here(TorchVarlen), _flash), Bare(_here(Efficient), _efficient)]
    if importlib.util.find_spec("torch.nn.attention.flex_attention"):  # from torch 2.5 on
        made.append(Bare(_here(Flex, attend=_attend), _flex))
    return {one.kernel.name: one for one in made}
