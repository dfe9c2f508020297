"""Before a kernel's first use it is tried: a few small documents, held against the reference, gradients too.

There are more builds of flash attention than anybody has tested: packages for another GPU, nightlies, backends whose
window is one wider, derivatives that forget an argument. Each would train on without a word. So nothing is taken on
trust: once in a process for every kind of call, and a kernel that is wrong, or leaks, is not used.
"""

from __future__ import annotations

from functools import cache

import torch

from ..documents.boundaries import Boundaries
from ..trying import out_of_reach, says_nothing
from .options import Options
from .protocol import Asked, Kernel
from .reference import Reference

LENGTHS = (1, 70, 5, 133, 64)
"""Of one token; longer than a block of keys and not a multiple of one; as long as one."""

WINDOW, SOFTCAP, SCALE, SLOPE = 9, 2.0, 0.7, 0.3
"""The scale is a share of the usual one, so that a kernel that takes the usual one for granted is seen to. The largest
slope is small, so that the keys at a window's edge still count."""

BOUNDS = {torch.float16: 2e-2, torch.bfloat16: 6e-2, torch.float32: 2e-2}
"""Largest error, as a share of the largest value: the dtype's rounding (float32: that of TF32, which a user may have
switched on). A wrong window or scale, and any leak, moves single values by the order of the largest."""


def passes(kernel: Kernel, asked: Asked, device: torch.device) -> tuple[bool, str]:
    """Whether a kernel computes what the reference does, and the reason where not; one look for each kind of call.

    An error that is no verdict (:func:`~fa2patch.trying.says_nothing`) is raised, and nothing is remembered of it.
    """
    if type(kernel) is Reference:
        return True, ""
    if kernel.BACKWARD:
        asked = asked._replace(gradients=True)
    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
    return _tried(kernel, asked._replace(features=_comparable(asked)), torch.device(device.type, index))


def _comparable(asked: Asked) -> tuple[str, ...]:
    """Dropout draws other weights in every kernel."""
    return tuple(name for name in asked.features if name != "dropout")


@cache
def _tried(kernel: Kernel, asked: Asked, device: torch.device) -> tuple[bool, str]:
    try:
        with out_of_reach(device), torch.autocast(device.type, enabled=False):
            return _compared(kernel, asked, device)
    except Exception as error:  # a kernel that cannot do it says so in its own way
        if says_nothing(error):
            raise  # the cache keeps no errors: the next try is a new one
        return False, f"tried on this machine it fails: {type(error).__name__}: {error}".splitlines()[0]


def _compared(kernel: Kernel, asked: Asked, device: torch.device) -> tuple[bool, str]:
    exact = torch.promote_types(asked.dtype, torch.float32)
    sizes = ((asked.heads, asked.head_dim), (asked.key_heads, asked.head_dim), (asked.key_heads, asked.value_dim))
    drawn = torch.Generator().manual_seed(0)
    half = [_normal(drawn, (sum(LENGTHS), *size), 1.5, asked.dtype, device) for size in sizes]
    sinks = [_normal(drawn, (asked.heads,), 2.0, asked.dtype, device)] if "sinks" in asked.features else []
    slopes = (SLOPE * torch.rand(asked.heads, generator=drawn)).to(device) if "alibi" in asked.features else None
    direction = _normal(drawn, (sum(LENGTHS), asked.heads, asked.value_dim), 1.0, asked.dtype, device)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).to(device, torch.int32)
    documents = Boundaries(ends, max(LENGTHS), None, LENGTHS)

    def computed(by: Kernel, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in (*half, *sinks)]
        options = Options(
            scale=SCALE * asked.head_dim**-0.5,
            causal=asked.causal,
            window=WINDOW if "window" in asked.features else None,
            softcap=SOFTCAP if "softcap" in asked.features else None,
            sinks=leaves[3] if sinks else None,
            alibi_slopes=slopes,
        )
        output = by(leaves[0], leaves[1], leaves[2], documents, options)
        return [output] if not asked.gradients else [output, *torch.autograd.grad(output, leaves, direction.to(dtype))]

    names = ("outputs", "gradients of q", "gradients of k", "gradients of v", "gradients of sinks")
    bound = BOUNDS.get(asked.dtype, 1e-6)
    for name, found, truth in zip(names, computed(kernel, asked.dtype), computed(Reference(), exact)):
        error = ((found.to(exact) - truth).abs().max() / truth.abs().max()).item()
        if not error <= bound:
            return False, f"tried on this machine, its {name} are off by {error:.0%} of the largest, or no numbers"
    return True, ""


def _normal(
    drawn: torch.Generator, size: tuple[int, ...], scale: float, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return (scale * torch.randn(size, generator=drawn)).to(device, dtype)
