"""Comparing what a kernel, a mixer or a model computes: how far tensors are apart, and where gradients go.

A trial, the proof of unknown modules and ``verify`` do the same: they change the tensors of some tokens, and look
whether outputs of other tokens change, and whether these send gradients there. A fault differs from rounding in its
size relative to the largest value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch


def distance(
    found: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    tokens: torch.Tensor | None = None,  # bool, with the tensors' first dimensions; None compares all
    least: float = 1e-30,  # what the largest expected value counts as if it is smaller
) -> float:
    # The distance is relative to the largest expected value of each pair. Values that are NaN in both, or the same
    # infinity, are equal. It is infinite where only one is finite, and where shapes or numbers of tensors differ.
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
    # Gradients are taken of this sum. Its weights are the same in each call. A sum of squares would hide a gradient
    # where an output is zero.
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
    again: bool = False,  # whether the graph is needed once more
) -> list[torch.Tensor]:
    # A tensor to which no gradient leads gets zeros.
    total = random_sum(outputs, tokens)
    if total is None:
        return [torch.zeros_like(one) for one in wanted]
    found = torch.autograd.grad(total, tuple(wanted), allow_unused=True, retain_graph=again)
    return [torch.zeros_like(one) if gradient is None else gradient for one, gradient in zip(wanted, found)]


def tensors(output: Any) -> Iterator[torch.Tensor]:
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
    # This number changes when a tensor is changed in place. Tensors of inference mode count no changes.
    if not isinstance(value, torch.Tensor):
        return 0
    return float(value.sum()) if value.is_inference() else value._version


def projected(values: torch.Tensor) -> torch.Tensor:
    # Four projections stand for logits over the vocabulary, or for what a module computes, because a change of any
    # number changes them.
    generator = torch.Generator().manual_seed(0)
    return values @ torch.randn(values.shape[-1], 4, generator=generator).to(values)


def _over(tokens: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return tokens.to(values.device).reshape(*tokens.shape, *[1] * (values.dim() - tokens.dim()))
