"""How near two results must be, and what is said where they are not."""

from __future__ import annotations

from typing import Any

import torch

TOLERANCE = 1e-5
"""Of the largest value compared, in float32."""

GRADIENT_TOLERANCE = 5e-5
"""The same for gradients: sums over all tokens, in another order where experts see another number of them."""


def assert_close(
    found: torch.Tensor, expected: torch.Tensor, what: str, tolerance: float = TOLERANCE, at_least: float = 1e-30
) -> None:
    """``found`` within ``tolerance`` of the largest value of ``expected``, or of ``at_least`` where that is larger."""
    if found.shape != expected.shape:
        raise AssertionError(f"{what}: shape {list(found.shape)}, expected {list(expected.shape)}")
    scale = expected.abs().max().clamp(min=at_least)
    error = ((found - expected).abs().max() / scale).item()
    if not error <= tolerance:
        raise AssertionError(f"{what}: off by {error:.1e} of the scale, allowed {tolerance:.0e}")


def assert_same_gradients(
    found: dict[str, Any], expected: dict[str, Any], tolerance: float = TOLERANCE, floor: float = 0.0
) -> None:
    """Every gradient within ``tolerance`` of its largest value, or of ``floor`` of the largest of all."""
    if found.keys() != expected.keys():
        raise AssertionError(f"gradients: other parameters: {sorted(found.keys() ^ expected.keys())[:4]}")
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        assert_close(found[name], gradient, f"gradient of {name}", tolerance, at_least=max(floor * largest, 1e-30))
