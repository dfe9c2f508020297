"""Compares results within a tolerance."""

from __future__ import annotations

from typing import Any

import torch

TOLERANCE = 1e-5
"""The largest accepted error in float32, relative to the largest expected value."""

GRADIENT_TOLERANCE = 5e-5
"""The same for gradients, which sum over all tokens, in another order if experts see another number of tokens."""


class TooFar(AssertionError):
    """Two results differ by more than a tolerance.

    Attributes:
        error: the difference, relative to the largest expected value.
        tolerance: the largest accepted one.
    """

    def __init__(self, what: str, error: float, tolerance: float) -> None:
        super().__init__(f"{what}: off by {error:.1e} of the scale, allowed {tolerance:.0e}")
        self.error, self.tolerance = error, tolerance


def assert_close(
    found: torch.Tensor, expected: torch.Tensor, what: str, tolerance: float = TOLERANCE, at_least: float = 1e-30
) -> None:
    """Raise :class:`TooFar` if ``found`` is not close to ``expected``, or AssertionError if its shape is another.

    Args:
        found, expected: Tensors of one shape.
        what: The name of the value in the error.
        tolerance: The largest accepted error, relative to the largest value of ``expected``.
        at_least: The smallest scale that the error is divided by.
    """
    if found.shape != expected.shape:
        raise AssertionError(f"{what}: shape {list(found.shape)}, expected {list(expected.shape)}")
    scale = expected.abs().max().clamp(min=at_least)
    error = ((found - expected).abs().max() / scale).item()
    if not error <= tolerance:
        raise TooFar(what, error, tolerance)


def assert_same_gradients(
    found: dict[str, Any], expected: dict[str, Any], tolerance: float = TOLERANCE, floor: float = 0.0
) -> None:
    """Raise an AssertionError if gradients, given by parameter name, are not close.

    Args:
        found, expected: Gradients by the name of their parameter.
        tolerance: The largest accepted error, relative to the gradient's largest value.
        floor: The smallest scale, relative to the largest value of all gradients.
    """
    if found.keys() != expected.keys():
        raise AssertionError(f"gradients: other parameters: {sorted(found.keys() ^ expected.keys())[:4]}")
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        assert_close(found[name], gradient, f"gradient of {name}", tolerance, at_least=max(floor * largest, 1e-30))
