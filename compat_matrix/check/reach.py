"""Which tokens of its input every block of a model looks at, measured by gradients."""

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
    """``[query, key]`` of a definition, where what it sees was ``spread`` tokens further back before."""
    places = range(LENGTH)
    return torch.tensor(
        [[any(sees(query, key + s, size) for s in range(spread + 1)) for key in places] for query in places]
    )


def spread(model: Any, block: str) -> int:
    """How far the convolutions in a block look back, beside its attention (Zaya's are before the keys)."""
    inside = model.get_submodule(block).modules()
    return sum(module.kernel_size[0] - 1 for module in inside if isinstance(module, torch.nn.Conv1d))


def alone(model: Any) -> dict[str, torch.Tensor]:
    """``[query, key]`` of every block, for a document run alone through the model as it is."""
    with _watched(model) as seen:
        run_alone(model, documents(LENGTH))
    return {name: _depends(*states, start=0) for name, states in seen.items()}


def packed(model: Any) -> dict[str, torch.Tensor]:
    """The same, for the second document of a packed row."""
    with fa2patch.apply(model), _watched(model) as seen:
        model(**pack(documents(3, LENGTH, 2)))
    return {name: _depends(*states, start=3) for name, states in seen.items()}


@contextmanager
def _watched(model: Any) -> Iterator[dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """What went into every member of every list of modules and what came out, the first time.

    ``[..., 1, tokens, width]``: Gemma 3n has four streams of them.
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
    """Whether token ``start + i`` of the output has a gradient to token ``start + j`` of the input."""
    direction = torch.randn(output.shape[-1], generator=torch.Generator().manual_seed(0)).to(output.dtype)
    rows = []
    for query in range(start, start + LENGTH):
        scalar = (output[..., query, :] @ direction).sum()
        (gradient,) = torch.autograd.grad(scalar, states, retain_graph=True, allow_unused=True)
        if gradient is None:
            gradient = torch.zeros_like(states)
        rows.append(gradient[..., start : start + LENGTH, :].flatten(0, -3).any(-1).any(0))
    return torch.stack(rows)
