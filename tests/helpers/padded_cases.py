"""What tests of padded batches that are computed packed look at: tokens in the layers, and gradients."""

from __future__ import annotations

from typing import Any

import torch

import fa2patch


def layers_tokens(model: Any) -> list[int]:
    # Each forward adds the number of tokens that the first layer computes to the list.
    found: list[int] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        found.append((args[0] if args else kwargs["hidden_states"])[..., 0].numel())

    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    layers[0].register_forward_pre_hook(note, with_kwargs=True)
    if fa2patch.status(model):
        fa2patch.apply(model, prove=False)  # the hook only looks, and a proof would run it
    return found


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_near(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], bound: float = 1e-5) -> None:
    # Each gradient may be off by a part of the largest of all.
    assert ours.keys() == theirs.keys()
    scale = max(float(value.abs().max()) for value in theirs.values())
    for name, expected in theirs.items():
        assert (ours[name] - expected).abs().max() <= bound * scale, name
