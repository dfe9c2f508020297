"""The reference, which every other kernel is compared with. It runs :mod:`.formula` on every device and dtype."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from .._compile import compiling
from . import reference_op
from .formula import over_documents
from .protocol import FEATURES, Kernel

if TYPE_CHECKING:
    from ..documents.boundaries import Boundaries
    from .options import Options


class Reference(Kernel):
    """Loops over the documents of a batch.

    It needs their lengths on the host: on a GPU one read per forward, in a compiled graph one per layer and direction.
    """

    name = "reference"
    what = "pure torch, document by document"
    needs = "nothing"
    DEVICES = DTYPES = MAX_HEAD_DIM = None
    MULTIPLE = 1
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
            return reference_op.attend(q, k, v, boundaries.cu_seqlens, options, scale)
        return over_documents(q, k, v, boundaries, replace(options, scale=scale))
