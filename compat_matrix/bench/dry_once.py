"""Trace every kernel's path on fake tensors with this environment's torch, and count what it dispatches.

Nothing is computed, and no device is needed: ``FakeTensorMode`` runs torch's own fake kernels, which give shapes. The
tensors of a forward alone are fake CUDA tensors. Those of forward and backward are fake CPU tensors, because torch's
autograd engine asks a CUDA tensor's device for its stream; the forward's counts are the same on both.
"""

from __future__ import annotations

import json
import logging
import warnings
from typing import Any, Callable, NamedTuple

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fa2patch.documents.boundaries import Boundaries
from fa2patch.documents.spans import Spans, spans_of
from fa2patch.documents.trees import Tree
from fa2patch.kernels import asked_by
from fa2patch.kernels.attention import packed_attention
from fa2patch.kernels.options import Options

from .dry_count import counted
from .dry_kernels import Bare, kernels

LENGTHS = (70, 50, 10, 90, 60)
PARENTS = (-1, 0, 0, 2, 2)
SPANS = ((5, 15), (140, 150))
HEADS = 8


class Case(NamedTuple):
    """A kind of layer, or of row.

    Attributes:
        key_heads, head_dim, value_dim: as in a layer; ``value_dim`` 0 is ``head_dim``.
        window: the sliding window, or None.
        sinks, trees, spans: whether the layer has sinks, and the row trees or spans.
    """

    key_heads: int = HEADS
    head_dim: int = 64
    value_dim: int = 0
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


def trace(bare: Bare, case: Case) -> dict[str, Any]:
    """Count two layers of one row, and for a plain layer the kernel called by hand.

    Returns:
        By direction, the counts of the ``first`` layer, of a ``later`` one and of the ``bare`` kernel, and ``device``,
        that of the forward's tensors. A direction that torch cannot trace has the reason ``why`` in the place of its
        counts, and so has a case that the kernel does not support.
    """
    able, why = _supports(bare, case)
    if not able:
        return {"why": why}
    device, forward = "cuda", _tried(bare, case, "cuda", backward=False)
    if "why" in forward:  # a build of torch for CPUs cannot run every fake kernel for CUDA
        device, forward = "cpu", _tried(bare, case, "cpu", backward=False)
    return {"device": device, "forward": forward, "backward": _tried(bare, case, "cpu", backward=True)}


def _supports(bare: Bare, case: Case) -> tuple[bool, str]:
    rows, sinks = _states(case, "cpu", False)
    asked = asked_by(*rows, Options(window=case.window, sinks=sinks), case.trees, case.spans)
    return bare.kernel.supports(asked._replace(device="cuda", gradients=True))


def _tried(bare: Bare, case: Case, device: str, backward: bool) -> dict[str, Any]:
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.set_grad_enabled(backward):
            return _traced(bare, case, device, backward)
    except Exception as error:  # torch raises errors of many types where it cannot trace
        return {"why": f"{type(error).__name__}: {error}".splitlines()[0][:120]}


def _traced(bare: Bare, case: Case, device: str, backward: bool) -> dict[str, Any]:
    rows, sinks = _states(case, device, backward)
    boundaries, options = _boundaries(case, device), Options(window=case.window, sinks=sinks)
    leaves = [x for x in (*rows, sinks) if x is not None]

    def layer() -> torch.Tensor:
        return packed_attention(*rows, boundaries, options, bare.kernel)

    def by_hand() -> torch.Tensor:
        flat = [x.flatten(0, 1) for x in rows]
        return bare.call(*flat, boundaries.cu_seqlens, boundaries.max_seqlen, case.head_dim**-0.5)

    calls = {"first": layer, "later": layer, **({"bare": by_hand} if case == CASES["plain"] else {})}
    return {name: _counted(call, leaves, backward) for name, call in calls.items()}


def _counted(call: Callable[[], torch.Tensor], leaves: list[torch.Tensor], backward: bool) -> dict[str, int]:
    """The counts of the call, or of its backward alone."""
    with counted() as found:
        output = call()
    if backward:
        grad = torch.empty_like(output)
        with counted() as found:
            torch.autograd.grad(output, leaves, grad)
    return dict(found)


def _states(case: Case, device: str, gradients: bool) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    sizes = ((HEADS, case.head_dim), (case.key_heads, case.head_dim), (case.key_heads, case.value_dim or case.head_dim))
    made = {"device": device, "dtype": torch.bfloat16, "requires_grad": gradients}
    sinks = torch.empty(HEADS, **made) if case.sinks else None
    return [torch.empty(1, sum(LENGTHS), *size, **made) for size in sizes], sinks


def _boundaries(case: Case, device: str) -> Boundaries:
    """The row's boundaries, with what the forward has read from the device before the first layer."""
    ends = np.cumsum([0, *LENGTHS])
    cu = torch.empty(len(ends), dtype=torch.int32, device=device)
    parents = torch.empty(len(LENGTHS), dtype=torch.int32, device=device) if case.trees else None
    until = torch.empty(sum(LENGTHS), dtype=torch.int32, device=device) if case.spans else None
    boundaries = Boundaries(cu, max(LENGTHS), None, LENGTHS, parents, until=until)
    if case.trees:
        boundaries.made[Tree] = Tree(LENGTHS, PARENTS, cu.device)
    if case.spans:
        seen = np.arange(sum(LENGTHS))
        for start, stop in SPANS:
            seen[start:stop] = stop - 1
        boundaries.made[Spans] = spans_of(seen, ends)
    return boundaries


def everything() -> dict[str, Any]:
    """Trace every kernel and case."""
    found = {name: {title: trace(bare, case) for title, case in CASES.items()} for name, bare in kernels().items()}
    return {"torch": torch.__version__.partition("+")[0], "kernels": found}


def main() -> None:
    """Trace every kernel and case, and print one JSON object."""
    warnings.simplefilter("ignore")
    logging.disable()  # torch logs a traceback for each error of a fake kernel
    torch.set_num_threads(1)
    print(json.dumps(everything()))


if __name__ == "__main__":
    main()
