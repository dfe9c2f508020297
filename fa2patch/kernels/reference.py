"""The reference, which every other kernel is compared with. It runs :mod:`.formula` on every device and dtype."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from .._torch import compiling, uncompiled
from . import cpu_flash, reference_op
from .cascade import Cascade, parts_of
from .formula import over_documents
from .protocol import FEATURES, Kernel

if TYPE_CHECKING:
    from ..documents.boundaries import Boundaries
    from .options import Options


class Reference(Kernel):
    """Loops over the documents of a batch, or over the segments of a tree.

    It needs their lengths on the host: on a GPU one read per forward, in a compiled graph one per layer and direction.
    """

    name = "reference"
    what = "pure torch, documents of near length at a time"
    needs = "nothing"
    DEVICES = DTYPES = MAX_HEAD_DIM = None
    MULTIPLE = 1
    GATHERS = False
    MASKS = True
    FEATURES = frozenset(FEATURES)

    def available(self) -> tuple[bool, str]:
        """Always ``(True, "")``."""
        return True, ""

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        boundaries: Boundaries,
        options: Options,
        scale: float,
    ) -> torch.Tensor:
        """Run the operator while a graph is captured, else the formula."""
        if compiling() and reference_op.attend is not None:
            return reference_op.attend(q, k, v, boundaries, options, scale)
        return _eagerly(q, k, v, boundaries, replace(options, scale=scale))


@uncompiled
def _eagerly(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, boundaries: Boundaries, options: Options
) -> torch.Tensor:
    if boundaries.tree is None or not _cascades(q, k, v, options):
        return over_documents(q, k, v, boundaries, options)
    assert options.scale is not None
    flash = cpu_flash.CpuFlash(boundaries.tree.lengths, options.scale)
    output: torch.Tensor = Cascade.apply(  # type: ignore[no-untyped-call]
        q, k, v, options.sinks, parts_of(boundaries), flash
    )
    return output


def _cascades(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> bool:
    """Whether a tree's attention can be computed by torch's flash attention for CPUs, without copies of keys."""
    special = (options.window, options.softcap, options.alibi_slopes)
    plain = all(option is None for option in special) and not options.dropout and q.shape[-1] == v.shape[-1]
    heads = cpu_flash.GROUPED or q.shape[1] == k.shape[1]
    return plain and heads and q.device.type == "cpu" and cpu_flash.AVAILABLE
