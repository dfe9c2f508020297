"""Measures by gradients which tokens of its input each block of a model depends on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import fa2patch

from .rows import alone as run_alone
from .rows import documents, pack

LENGTH = 12


def of(sees: Any, size: int, spread: int = 0) -> torch.Tensor:
    """The reach that a definition gives, as booleans ``[query, key]``.

    Args:
        sees: The definition, called with a query, a key and ``size``.
        size: The size of the window or chunk.
        spread: How many tokens convolutions before the attention look back; they extend the reach.
    """
    places = range(LENGTH)
    return torch.tensor(
        [[any(sees(query, key + s, size) for s in range(spread + 1)) for key in places] for query in places]
    )


def spread(model: Any, block: str) -> int:
    """How many tokens the convolutions in a block look back, besides its attention (Zaya's are before the keys)."""
    inside = model.get_submodule(block).modules()
    return sum(module.kernel_size[0] - 1 for module in inside if isinstance(module, torch.nn.Conv1d))


def alone(model: Any) -> dict[str, torch.Tensor]:
    """The reach ``[query, key]`` of every block, by name, for a document alone in the unpatched model."""
    with _watched(model) as seen:
        run_alone(model, documents(LENGTH))
    return {name: _depends(*states, start=0) for name, states in seen.items()}


def packed(model: Any) -> dict[str, torch.Tensor]:
    """The reach ``[query, key]`` of every block, by name, for the second document of a packed row."""
    with fa2patch.apply(model), _watched(model) as seen:
        model(**pack(documents(3, LENGTH, 2)))
    return {name: _depends(*states, start=3) for name, states in seen.items()}


@contextmanager
def _watched(model: Any) -> Iterator[dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Give the input and output of the first call of every block, by name.

    Blocks are the members of module lists. States are ``[..., 1, tokens, width]``, because Gemma 3n has four streams.
    """
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    lists = [name for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)]
    blocks = [(f"{name}.{i}", block) for name in lists for i, block in model.get_submodule(name).named_children()]

    def note(name: str) -> Any:
        def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            states = args[0] if args else kwargs.get("hidden_states")
            out = output[0] if isinstance(output, tuple) else output
            whole = all(isinstance(x, torch.Tensor) and x.dim() >= 3 and x.requires_grad for x in (states, out))
            if whole and states.shape == out.shape and states.shape[-3] == 1 and name not in seen:
                seen[name] = states, out

        return hook

    handles = [block.register_forward_hook(note(name), with_kwargs=True) for name, block in blocks]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _depends(states: torch.Tensor, output: torch.Tensor, start: int) -> torch.Tensor:
    """Booleans ``[i, j]``: whether output token ``start + i`` has a gradient to input token ``start + j``."""
    direction = torch.randn(output.shape[-1], generator=torch.Generator().manual_seed(0)).to(output.dtype)
    rows = []
    for query in range(start, start + LENGTH):
        scalar = (output[..., query, :] @ direction).sum()
        (gradient,) = torch.autograd.grad(scalar, states, retain_graph=True, allow_unused=True)
        if gradient is None:
            gradient = torch.zeros_like(states)
        rows.append(gradient[..., start : start + LENGTH, :].flatten(0, -3).any(-1).any(0))
    return torch.stack(rows)
