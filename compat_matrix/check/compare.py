"""Compares results within a tolerance."""

from __future__ import annotations

from typing import Any, Callable

import torch

TOLERANCE = 1e-5  # the largest accepted error in float32, relative to the largest expected value

# Gradients sum over all tokens, in another order if experts see another number of tokens.
GRADIENT_TOLERANCE = 5e-5

# In bfloat16, packed rows may be off by this factor times the error of documents alone, plus this part of the mean
# logit. Errors are means and not maxima, because rounding may also route a token to another expert.
HALF_FACTOR, HALF_FLOOR = 2.0, 5e-3


class TooFar(AssertionError):
    # Both numbers are relative to the largest expected value.

    def __init__(self, what: str, error: float, tolerance: float) -> None:
        super().__init__(f"{what}: off by {error:.1e} of the scale, allowed {tolerance:.0e}")
        self.error, self.tolerance = error, tolerance


def assert_close(
    found: torch.Tensor, expected: torch.Tensor, what: str, tolerance: float = TOLERANCE, at_least: float = 1e-30
) -> None:
    # The tolerance is relative to the largest expected value, or to at_least if that is larger.
    if found.shape != expected.shape:
        raise AssertionError(f"{what}: shape {list(found.shape)}, expected {list(expected.shape)}")
    scale = expected.abs().max().clamp(min=at_least)
    error = ((found - expected).abs().max() / scale).item()
    if not error <= tolerance:
        raise TooFar(what, error, tolerance)


def assert_as_near(
    found: torch.Tensor, exact: torch.Tensor, alone: torch.Tensor, otherwise: Callable[[], torch.Tensor] | None = None
) -> None:
    """Raise if packed rows are much further from float32 than documents alone in the same dtype."""
    # found: logits of packed rows, in the dtype that is checked. exact: of documents alone in float32. alone: of
    # documents alone in the dtype, with eager attention.
    # otherwise: computes "alone" with the model's own attention, if "found" is too far. Its rounding is another, and
    # one token of a small batch that another expert gets changes the mean.
    errors = [_mean_error(found, exact), _mean_error(alone, exact)]
    if otherwise is not None and not errors[0] <= HALF_FACTOR * errors[1] + HALF_FLOOR:
        errors.append(_mean_error(otherwise(), exact))
    if not errors[0] <= HALF_FACTOR * errors[-1] + HALF_FLOOR:
        alone_errors = " and ".join(f"{error:.1e}" for error in errors[1:])
        raise AssertionError(f"{errors[0]:.1e} from float32 in the mean, alone {alone_errors}")


def _mean_error(logits: torch.Tensor, exact: torch.Tensor) -> float:
    return ((logits.float() - exact).abs().mean() / exact.abs().mean()).item()


def assert_finite(gradients: dict[str, Any]) -> None:
    if not gradients or not all(torch.isfinite(gradient).all() for gradient in gradients.values()):
        raise AssertionError("gradients are missing or not finite")


def assert_same_gradients(
    found: dict[str, Any], expected: dict[str, Any], tolerance: float = TOLERANCE, floor: float = 0.0
) -> None:
    # A gradient's largest value counts as at least "floor" times that of all gradients.
    if found.keys() != expected.keys():
        raise AssertionError(f"gradients: other parameters: {sorted(found.keys() ^ expected.keys())[:4]}")
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        assert_close(found[name], gradient, f"gradient of {name}", tolerance, at_least=max(floor * largest, 1e-30))
