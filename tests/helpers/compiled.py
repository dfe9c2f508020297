"""Models to compile, and compiled models compared with the same model run eagerly."""

import pytest
import torch
from packed_rows import built

import fa2patch


def on_the_interface_seam(family, **changes):
    # The model is eager if there is no sdpa, which makes no difference to packed rows.
    model = built(family, **changes)
    if {layer.seam for layer in fa2patch.apply(model).layers} != {"interface"}:
        pytest.skip(f"{family} is not on the interface seam of this Transformers")
    return model


def assert_like_eager(compiled, model, given):
    # Logits, losses and gradients of all weights are compared. The gradients are cleared afterwards.
    found = compiled(**given)
    found.loss.backward()
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    model.zero_grad()
    expected = model(**given)
    expected.loss.backward()
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-5)
    for weight, gradient in zip((w for w in model.parameters() if w.grad is not None), gradients):
        torch.testing.assert_close(gradient, weight.grad, rtol=1e-4, atol=1e-5)
    model.zero_grad()
