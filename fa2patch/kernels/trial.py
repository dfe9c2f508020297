"""The trial of a kernel before its first use: a few small documents, compared with the reference, gradients too.

There are more builds of flash attention than anybody has tested: packages for another GPU, nightlies, backends whose
window is one token wider, derivatives that ignore an argument. Each of them would train without an error. So every kind
of call is tried once per process, and a kernel that is wrong, or leaks, is not used.
"""

from __future__ import annotations

from functools import cache

import torch

from .._torch import is_no_verdict, outside_the_forward
from ..comparison import distance
from ..documents.boundaries import Boundaries
from .protocol import Asked, Kernel, Options
from .reference import Reference

LENGTHS = (1, 70, 5, 133, 64)
"""Document lengths: one token; less than a block of keys; one block; more than a block, and not a multiple of one."""

PARENTS = (-1, -1, 1, 1, 3)
"""The documents as segments of a tree, if the call has one: a root alone, and one with two levels below it."""

SPANS = ((1, 10), (30, 39), (39, 46), (71, 76), (200, 209), (264, 273))
"""The spans of the documents, if the call has some, as ``(first token, token behind the last)``: at a document's
beginning, inside one, two side by side, a whole document, and at a document's end. None is longer than the window."""

WINDOW, SOFTCAP, SCALE, SLOPE = 9, 2.0, 0.7, 0.3
"""The scale is relative to the usual one, so that a kernel that ignores the argument fails. The slopes are small, so
that the keys at a window's edge still have a weight."""

BOUNDS = {torch.float16: 2e-2, torch.bfloat16: 6e-2, torch.float32: 2e-2}
"""Largest allowed error, relative to the largest value. It covers the dtype's rounding; for float32 that of TF32, which
a user may have enabled. A wrong window or scale, and any leak, changes single values by the order of the largest."""


def passes(kernel: Kernel, asked: Asked, device: torch.device) -> tuple[bool, str]:
    """Whether a kernel agrees with the reference, and the reason if not. Each kind of call is tried once.

    Dropout is not tried, because every kernel drops other weights. A kernel with a backward is always tried with
    gradients.

    Raises:
        Exception: an error that is no verdict (:func:`~fa2patch._torch.is_no_verdict`). It is not remembered.
    """
    if type(kernel) is Reference:
        return True, ""
    if kernel.BACKWARD:
        asked = asked._replace(gradients=True)
    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
    features = tuple(name for name in asked.features if name != "dropout")
    return _tried(kernel, asked._replace(features=features), torch.device(device.type, index))


@cache
def _tried(kernel: Kernel, asked: Asked, device: torch.device) -> tuple[bool, str]:
    """The verdict about a kind of call. A build that fails with v's own head dimension gets another try with q's."""
    able, reason = _verdict(kernel, asked, device)
    dim, value_dim = kernel.padded(asked.head_dim, asked.value_dim)
    if not able and dim != value_dim and kernel.MULTIPLE > 1:
        kernel.alike |= {(asked.head_dim, asked.value_dim)}
        able, reason = _verdict(kernel, asked, device)
    return able, reason


def _verdict(kernel: Kernel, asked: Asked, device: torch.device) -> tuple[bool, str]:
    try:
        with outside_the_forward(device), torch.autocast(device.type, enabled=False):
            return _compared(kernel, asked, device)
    except Exception as error:  # kernels raise errors of many types
        if is_no_verdict(error):
            raise  # the cache keeps no exceptions, so the next call tries again
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
    parents = torch.tensor(PARENTS).to(ends) if "trees" in asked.features else None
    until = _until().to(ends) if "spans" in asked.features else None
    documents = Boundaries(ends, max(LENGTHS), None, LENGTHS, parents, until=until)

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
        error = distance([found], [truth])
        if error > bound:
            return False, f"tried on this machine, its {name} are off by {error:.0%} of the largest, or no numbers"
    return True, ""


def _until() -> torch.Tensor:
    until = torch.arange(sum(LENGTHS))
    for start, stop in SPANS:
        until[start:stop] = stop - 1
    return until


def _normal(
    drawn: torch.Generator, size: tuple[int, ...], scale: float, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return (scale * torch.randn(size, generator=drawn)).to(device, dtype)
