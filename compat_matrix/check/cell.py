"""What must hold in a cell. A point is a function of a :class:`Cell`; it returns, or raises with what it found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

import torch

from .. import tiny_models
from ..user_models import models
from .compare import GRADIENT_TOLERANCE, TOLERANCE, assert_close

POINTS: dict[str, Callable[[Cell], None]] = {}


def point(function: Callable[[Cell], None]) -> Callable[[Cell], None]:
    POINTS[function.__name__] = function
    return function


class NotApplicable(Exception):
    """This family has no such feature in this version; the reason goes into the evidence."""


@dataclass
class Cell:
    """One family, loaded with one attention implementation, in the installed Transformers."""

    family: str
    implementation: str

    def model(self, dtype: torch.dtype | None = None, **changes: Any) -> Any:
        return tiny_models.build(self.family, self.implementation, dtype or self.dtype, **changes)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.family in tiny_models.IN_DOUBLE_PRECISION else torch.float32

    @property
    def of_gradients(self) -> dict[str, float]:
        """How near gradients must be. Without rope that of a key's bias is 0, and all there is of it is rounding."""
        seed = self.family in tiny_models.SEEDS
        return {} if seed else {"tolerance": GRADIENT_TOLERANCE, "floor": 0.01}

    def reference(self, dtype: torch.dtype | None = None, **changes: Any) -> Any:
        """The same weights, unpatched, eager (Falcon's eager code fails on one token: sdpa)."""
        return tiny_models.build(
            self.family, "sdpa" if models.kind(self.family) == "falcon" else "eager", dtype or self.dtype, **changes
        )


def assert_unmoved(cell: Cell, after: torch.Tensor, before: torch.Tensor) -> None:
    """Bit for bit the same; to rounding where experts multiply another number of tokens at a time."""
    if tiny_models.is_mixture(cell.family):
        tolerance = TOLERANCE if before.dtype == torch.float32 else 1e-2
        assert_close(after.float(), before.float(), "logits after another document changed", tolerance)
    elif not torch.equal(before, after):
        raise AssertionError(f"a changed document moved another one's logits by {(before - after).abs().max():.1e}")
