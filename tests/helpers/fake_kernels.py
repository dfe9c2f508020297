"""What every GPU kernel's path dispatches beyond the kernel, traced without a device.

Nothing is computed: ``FakeTensorMode`` runs torch's own fake kernels, which give shapes. The tensors of a forward alone
are fake CUDA tensors. Those of forward and backward are fake CPU tensors, because torch's autograd engine asks a CUDA
tensor's device for its stream; the forward's counts are the same on both. fa2patch's own code runs around the call of
a kernel. Where torch has no such kernel, an operator of torch that returns tensors of the right shape takes its place.

FlexAttention's own kernels are not part of it.
"""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any, Callable, NamedTuple

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from compat_matrix.bench.operators import OF_STAND_INS, counted
from fa2patch.documents.boundaries import Boundaries
from fa2patch.documents.spans import Spans, on_the_host
from fa2patch.documents.trees import Tree
from fa2patch.kernels import Options, asked_by, packed_attention
from fa2patch.kernels import flex as flex_module
from fa2patch.kernels.aten import Efficient, TorchVarlen
from fa2patch.kernels.flex import Flex
from fa2patch.kernels.protocol import Kernel
from fa2patch.kernels.varlen import PARAMETERS, EntryPoint, FlashAttn, FlashAttn3, FlashAttn4

# --- kernels, and fake functions where torch has none ---------------------------------------------------------

_library = torch.library.Library(OF_STAND_INS, "DEF")
_library.define("made(Tensor[] like) -> Tensor[]")
_library.impl("made", lambda like: [torch.empty_like(x) for x in like], "Meta")


def _made(*like: torch.Tensor) -> list[torch.Tensor]:
    # One operator stands for a kernel. It returns tensors of these shapes.
    return list(torch.ops.fa2patch_dry.made(like))


class _Attention(torch.autograd.Function):
    # One operator forward and one backward, as in the autograd functions of flash-attn and of FlexAttention.

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> Any:
        ctx.save_for_backward(q, k, v, *([] if sinks is None else [sinks]))
        return tuple(_made(q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=torch.float32)))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, of_lse: torch.Tensor) -> Any:
        found = _made(*ctx.saved_tensors)
        return (*found, *[None] * (4 - len(found)))


def _varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> Any:
    # It stands for flash_attn_varlen_func: q, k and v are [tokens, heads, head dim], and the output has q's layout.
    sinks = next((arguments[name] for name in PARAMETERS["sinks"] if name in arguments), None)
    return _Attention.apply(q, k, v, sinks)[0]  # type: ignore[no-untyped-call]


def _flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> Any:
    # It stands for flex_attention: q, k and v are [1, heads, tokens, head dim], and the output has q's layout.
    laid = [x.transpose(1, 2) for x in (q, k, v)]
    output, lse = (x.transpose(1, 2) for x in _Attention.apply(*laid, None))  # type: ignore[no-untyped-call]
    if arguments.get("return_aux"):  # from torch 2.9 on, in the place of return_lse
        return output, SimpleNamespace(lse=lse)
    return (output, lse) if arguments.get("return_lse") else output


def _block_mask(visible: Callable[..., Any], *unused: Any) -> Any:
    # It stands for a compiled create_block_mask: one operator, made of a tensor that "visible" refers to.
    held = (cell.cell_contents for cell in visible.__closure__ or ())
    return _made(next(x for x in held if isinstance(x, torch.Tensor)))[0]


def kernels() -> dict[str, tuple[Kernel, Callable[..., torch.Tensor]]]:
    # Best first, as "auto" tries them on a GPU. Each has the same computation by hand, for documents without options:
    # call(q, k, v, cu_seqlens, longest, scale).

    def here(kernel: type[Kernel], **members: Any) -> Kernel:
        made: Kernel = type(kernel.__name__, (kernel,), {"available": lambda self: (True, ""), **members})()
        return made

    def entry(kernel: type[Kernel]) -> Kernel:
        names = frozenset(PARAMETERS[feature][0] for feature in kernel.FEATURES if feature in PARAMETERS)
        return here(kernel, found=lambda self: EntryPoint(_varlen, names))

    def flash(q: Any, k: Any, v: Any, cu: Any, longest: int, scale: float) -> Any:
        operator = torch.ops.aten._flash_attention_forward.default
        return operator(q, k, v, cu, cu, longest, longest, 0.0, True, False, scale=scale)[0]

    def efficient(q: Any, k: Any, v: Any, cu: Any, longest: int, scale: float) -> Any:
        operator, rows = torch.ops.aten._efficient_attention_forward.default, [x[None] for x in (q, k, v)]
        return operator(*rows, None, cu, cu, longest, longest, 0.0, 1, True, scale=scale)[0].squeeze(0)

    made: list[Any] = [
        (entry(kernel), lambda q, k, v, *_: _varlen(q, k, v)) for kernel in (FlashAttn3, FlashAttn, FlashAttn4)
    ]
    made += [(here(TorchVarlen), flash), (here(Efficient), efficient)]
    if importlib.util.find_spec("torch.nn.attention.flex_attention"):  # from torch 2.5 on
        own = here(Flex, attend=lambda self, *given: flex_module.compute(_flex, _block_mask, *given))
        made.append((own, lambda q, k, v, *_: _flex(*(x.transpose(0, 1)[None] for x in (q, k, v)))))
    return {kernel.name: (kernel, call) for kernel, call in made}


# --- tracing --------------------------------------------------------------------------------------------------

LENGTHS, PARENTS, SPANS, HEADS = (70, 50, 10, 90, 60), (-1, 0, 0, 2, 2), ((5, 15), (140, 150)), 8


class Case(NamedTuple):
    key_heads: int = HEADS
    head_dim: int = 64
    value_dim: int = 0  # 0 stands for head_dim
    window: int | None = None
    sinks: bool = False
    trees: bool = False
    spans: bool = False


CASES = {
    "plain": Case(),
    "grouped heads": Case(key_heads=2),
    "window": Case(window=20),
    "sinks": Case(sinks=True),
    "MLA": Case(head_dim=192, value_dim=128),
    "head dim 80": Case(head_dim=80),
    "head dim 100": Case(head_dim=100),
    "trees": Case(trees=True),
    "spans": Case(spans=True),
}


def trace(kernel: Kernel, by_hand: Any, case: Case) -> dict[str, Any]:
    # By direction: the counts of the "first" layer, of a "later" one and of the "bare" kernel. A direction that torch
    # cannot trace has the reason "why" in their place. So has a case that the kernel does not support.
    rows, sinks = _states(case, "cpu", False)
    asked = asked_by(*rows, Options(window=case.window, sinks=sinks), case.trees, case.spans)
    able, why = kernel.supports(asked._replace(device="cuda", gradients=True))
    if not able:
        return {"why": why}
    forward = _tried(kernel, by_hand, case, "cuda", backward=False)
    if "why" in forward:  # a build of torch for CPUs cannot run every fake kernel for CUDA
        forward = _tried(kernel, by_hand, case, "cpu", backward=False)
    return {"forward": forward, "backward": _tried(kernel, by_hand, case, "cpu", backward=True)}


def _tried(kernel: Kernel, by_hand: Any, case: Case, device: str, backward: bool) -> dict[str, Any]:
    found = {}
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.set_grad_enabled(backward):
            rows, sinks = _states(case, device, backward)
            boundaries, options = _boundaries(case, device), Options(window=case.window, sinks=sinks)
            for name in ("first", "later", *(["bare"] if case == Case() else [])):
                with counted() as counts:
                    if name == "bare":
                        flat = [x.flatten(0, 1) for x in rows]
                        output = by_hand(*flat, boundaries.cu_seqlens, boundaries.max_seqlen, case.head_dim**-0.5)
                    else:
                        output = packed_attention(*rows, boundaries, options, kernel)
                if backward:
                    grad = torch.empty_like(output)
                    with counted() as counts:
                        torch.autograd.grad(output, [x for x in (*rows, sinks) if x is not None], grad)
                found[name] = dict(counts)
    except Exception as error:  # torch raises errors of many types where it cannot trace
        return {"why": f"{type(error).__name__}: {error}".splitlines()[0][:120]}
    return found


def _states(case: Case, device: str, gradients: bool) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    sizes = ((HEADS, case.head_dim), (case.key_heads, case.head_dim), (case.key_heads, case.value_dim or case.head_dim))
    made: Any = {"device": device, "dtype": torch.bfloat16, "requires_grad": gradients}
    sinks = torch.empty(HEADS, **made) if case.sinks else None
    return [torch.empty(1, sum(LENGTHS), *size, **made) for size in sizes], sinks


def _boundaries(case: Case, device: str) -> Boundaries:
    # They hold what the forward has read from the device before the first layer.
    ends = np.cumsum([0, *LENGTHS])
    made: Any = {"dtype": torch.int32, "device": device}
    parents = torch.empty(len(LENGTHS), **made) if case.trees else None
    until = torch.empty(sum(LENGTHS), **made) if case.spans else None
    boundaries = Boundaries(torch.empty(len(ends), **made), max(LENGTHS), None, LENGTHS, parents, until=until)
    if case.trees:
        boundaries.made[Tree] = Tree(LENGTHS, PARENTS, boundaries.cu_seqlens.device)
    if case.spans:
        seen = np.arange(sum(LENGTHS))
        for start, stop in SPANS:
            seen[start:stop] = stop - 1
        boundaries.made[Spans] = on_the_host(seen, ends)
    return boundaries
