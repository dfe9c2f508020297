"""The cell that points check. A point is a function of a :class:`Cell` that raises an error if it does not hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
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
    """The family has no such feature in this version. The reason goes into the evidence.

    Without a reason, the point is one of rows of text.
    """


class AloneFails(Exception):
    """Transformers alone cannot compute what the point compares with. The reason goes into the evidence."""


@contextmanager
def unless_alone_raises(alone: Callable[[], object]) -> Iterator[None]:
    # An error of what is checked is AloneFails if "alone", without fa2patch, raises the same one.
    try:
        yield
    except Exception as error:
        try:
            alone()
        except Exception as same:
            if (type(same), str(same)) == (type(error), str(error)):
                raise AloneFails(f"the unpatched model fails in training: {type(same).__name__}: {same}") from error
        raise


@dataclass
class Cell:
    """One family with one attention implementation in the installed Transformers."""

    family: str
    implementation: str
    in_double: bool = False  # float64 in place of float32
    # The kernels of a GPU compute half precision, and heads of other sizes than the tiny ones.
    in_bfloat16: bool = False
    sizes: Mapping[str, Any] = field(default_factory=dict)
    times: int = 1  # how many times as long documents are at the points that a GPU is checked at

    def model(self, dtype: torch.dtype | None = None, **changes: Any) -> Any:
        made = {**self.sizes, **changes}
        return tiny_models.build(self.family, self.implementation, dtype or self.dtype, **made)

    @property
    def dtype(self) -> torch.dtype:
        if self.in_bfloat16:
            return torch.bfloat16
        double = self.in_double or self.family in tiny_models.IN_DOUBLE_PRECISION
        return torch.float64 if double else torch.float32

    @property
    def of_gradients(self) -> dict[str, float]:
        # The floor is needed because, without rope, a key bias has only rounding.
        seed = self.family in tiny_models.SEEDS
        return {} if seed else {"tolerance": GRADIENT_TOLERANCE, "floor": 0.01}

    def reference(self, dtype: torch.dtype | None = None, **changes: Any) -> Any:
        # The same model with eager attention. Falcon uses sdpa, because its eager code fails on one token.
        # Phi-4-multimodal with pictures is built as it is: its encoder computes another attention in eager code, where
        # its is_causal is True.
        implementation = "sdpa" if models.kind(self.family) == "falcon" else "eager"
        if self.family == "phi4_multimodal:picture":
            implementation = self.implementation
        return tiny_models.build(self.family, implementation, dtype or self.dtype, **{**self.sizes, **changes})

    def lengths(self, *of: int) -> tuple[int, ...]:
        return tuple(self.times * length for length in of)


def assert_unmoved(cell: Cell, after: torch.Tensor, before: torch.Tensor) -> None:
    # A mixture may differ by rounding, as its matmuls change shape.
    if tiny_models.is_mixture(cell.family):
        tolerance = TOLERANCE if before.dtype == torch.float32 else 1e-2
        assert_close(after.float(), before.float(), "logits after another document changed", tolerance)
    elif not torch.equal(before, after):
        raise AssertionError(f"a changed document moved another one's logits by {(before - after).abs().max():.1e}")
