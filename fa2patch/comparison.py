"""Comparing what a kernel, a mixer or a model computes: how far tensors are apart, and where gradients go.

A trial, the proof of unknown modules and ``verify`` do the same: they change the tensors of some tokens, and look
whether outputs of other tokens change, and whether these send gradients there. A fault is told from rounding by its
size beside the largest value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch


def distance(
    found: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    tokens: torch.Tensor | None = None,
    least: float = 1e-30,
) -> float:
    """The largest difference between tensors and those that are expected, relative to the largest expected value.

    Each pair has a scale of its own. Values that are NaN in both, or the same infinity, are equal. The result is
    infinity where only one is finite, and if shapes or the numbers of tensors differ.

    Args:
        found, expected: the tensors.
        tokens: bool, with the tensors' first dimensions: where they are compared. None compares all.
        least: what the largest expected value counts as if it is smaller.
    """
    if [one.shape for one in found] != [other.shape for other in expected]:
        return float("inf")
    largest = 0.0
    for one, other in zip(found, expected):
        one, other = one.detach(), other.detach().to(one.device)
        same = (one == other) | (one.isnan() & other.isnan())
        if tokens is not None:
            same = same | ~_over(tokens, one)
        if same.all():
            continue
        exact = torch.promote_types(torch.promote_types(one.dtype, other.dtype), torch.float32)
        one, other = one.to(exact), other.to(exact)
        finite = torch.where(other.isfinite(), other.abs(), 0.0)  # an infinite logit must not be the scale
        difference = float(torch.where(same, 0.0, (one - other).abs()).max() / finite.max().clamp(min=least))
        largest = max(largest, difference if difference < float("inf") else float("inf"))  # NaN is no number
    return largest


def random_sum(outputs: Sequence[torch.Tensor], tokens: torch.Tensor | None = None) -> torch.Tensor | None:
    """A random sum of outputs, to take gradients of; None if no output needs a gradient.

    The weights are the same in each call. A sum of squares would hide a gradient where an output is zero.

    Args:
        outputs: the outputs.
        tokens: bool, with the outputs' first dimensions: what is summed. None sums all.
    """
    drawn: dict[torch.device, torch.Generator] = {}  # on the device: outputs of a long row have many numbers
    total = None
    for values in outputs:
        device = values.device
        generator = drawn.setdefault(device, torch.Generator(device).manual_seed(0))
        weights = torch.randn(values.shape, generator=generator, device=device)
        if values.requires_grad:
            kept = values.float() if tokens is None else torch.where(_over(tokens, values), values.float(), 0.0)
            part = (kept * weights).sum()
            total = part if total is None else total + part.to(total.device)
    return total


def gradients(
    outputs: Sequence[torch.Tensor],
    wanted: Sequence[torch.Tensor],
    tokens: torch.Tensor | None = None,
    again: bool = False,
) -> list[torch.Tensor]:
    """The gradients of :func:`random_sum` with respect to some tensors; zeros where nothing leads to one.

    Args:
        outputs, tokens: as there.
        wanted: the tensors.
        again: whether the graph is needed once more.
    """
    total = random_sum(outputs, tokens)
    if total is None:
        return [torch.zeros_like(one) for one in wanted]
    found = torch.autograd.grad(total, tuple(wanted), allow_unused=True, retain_graph=again)
    return [torch.zeros_like(one) if gradient is None else gradient for one, gradient in zip(wanted, found)]


def tensors(output: Any) -> Iterator[torch.Tensor]:
    """The tensors in an output: a tensor, a container of such, or an object with such attributes."""
    if isinstance(output, torch.Tensor):
        yield output
        return
    inside: Iterable[Any] = ()
    if isinstance(output, Mapping):
        inside = output.values()
    elif isinstance(output, (list, tuple)):
        inside = output
    elif dataclasses.is_dataclass(output):
        inside = vars(output).values()
    for each in inside:
        yield from tensors(each)


def version(value: Any) -> float:
    """A number that is another one after a tensor was changed in place. Those of inference mode count no changes."""
    if not isinstance(value, torch.Tensor):
        return 0
    return float(value.sum()) if value.is_inference() else value._version


def projected(values: torch.Tensor) -> torch.Tensor:
    """Four random projections ``[..., 4]`` of vectors ``[..., n]``, which a change of any of their numbers changes.

    They are kept in the place of logits over the vocabulary, and of what all modules compute.
    """
    generator = torch.Generator().manual_seed(0)
    return values @ torch.randn(values.shape[-1], 4, generator=generator).to(values)


def _over(tokens: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A mask of tokens with further dimensions, as a tensor with values for each token has them."""
    return tokens.to(values.device).reshape(*tokens.shape, *[1] * (values.dim() - tokens.dim()))
