"""Packed attention by its definition, and what kernels are called with to be compared with it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Callable

import torch

from fa2patch.documents.boundaries import Boundaries
from fa2patch.kernels import Options

LENGTHS = (1, 5, 3, 8)
HEADS, DIM = 4, 8
WINDOWS: dict[str, int | None] = {"no window": None, "window 1": 1, "smaller": 4, "equal": 8, "larger": 20}

# the first token of each span, and the token behind its last
Spans = Sequence["tuple[int, int]"]


def documents(
    lengths: Sequence[int], device: str = "cpu", parents: Sequence[int] | None = None, spans: Spans | None = None
) -> Boundaries:
    of_segments = None if parents is None else torch.tensor(parents, dtype=torch.int32, device=device)
    until = None if spans is None else last_seen(sum(lengths), spans).to(device, torch.int32)
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    return Boundaries(ends, max(lengths), parents=of_segments, until=until)


def last_seen(tokens: int, spans: Spans) -> torch.Tensor:
    # A token sees up to the last one of its span, or up to itself.
    until = torch.arange(tokens)
    for start, stop in spans:
        until[start:stop] = stop - 1
    return until


def states(
    lengths: Sequence[int] = LENGTHS,
    dtype: torch.dtype = torch.float64,
    groups: int = 1,
    dim: int = DIM,
    value_dim: int = DIM,
    device: str = "cpu",
    heads: int = HEADS,
) -> list[torch.Tensor]:
    # One row's q, k and v are [tokens, heads, dim], and so large that a weight on a wrong key shows.
    sizes = ((heads, dim), (heads // groups, dim), (heads // groups, value_dim))
    return [
        (1.5 * torch.randn(sum(lengths), *size, dtype=torch.float64)).to(device, dtype).requires_grad_()
        for size in sizes
    ]


def _tree(lengths: Sequence[int], parents: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    # The results say whether a token's segment continues another token's, and the tokens' places on their paths.
    of_token = [segment for segment, length in enumerate(lengths) for _ in range(length)]
    continues = torch.zeros(len(of_token), len(of_token), dtype=torch.bool)
    place = []
    for token, segment in enumerate(of_token):
        before, seen = 0, {segment}
        while parents[segment] >= 0:
            segment = parents[segment]
            seen.add(segment)
            before += lengths[segment]
        place.append(before + token - of_token.index(of_token[token]))
        continues[token] = torch.tensor([other in seen for other in of_token])
    return continues, torch.tensor(place)


def brute_force(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Sequence[int],
    options: Options,
    parents: Sequence[int] | None = None,
    spans: Spans | None = None,
) -> torch.Tensor:
    # The definition: all scores of the row, with -inf added where a query must not attend.
    tokens, heads, dim = q.shape
    key_head = torch.arange(heads, device=q.device) // (heads // k.shape[1])
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(q.device)
    token = torch.arange(tokens, device=q.device)
    place = torch.cat([torch.arange(length) for length in lengths]).to(q.device)
    distance = token[:, None] - token[None, :]
    allowed = document[:, None] == document[None, :]
    if parents is not None:
        allowed, place = (x.to(q.device) for x in _tree(lengths, parents))
        distance = place[:, None] - place[None, :]
    if options.causal:
        later = token <= last_seen(tokens, spans or ()).to(q.device)[:, None]
        allowed = allowed & ((distance >= 0) if spans is None else later)
    if options.window is not None:
        allowed = allowed & (distance < options.window) & (-distance < options.window)
    scores = torch.einsum("ihd,jhd->hij", q, k[:, key_head]) * (dim**-0.5 if options.scale is None else options.scale)
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if options.bias is not None:
        scores = scores + options.bias[:, place[:, None], place[None, :]].to(scores.dtype)
    if options.alibi_slopes is not None:
        scores = scores - (options.alibi_slopes[:, None, None] * distance.abs()).to(scores.dtype)
    scores = scores + torch.zeros(tokens, tokens, dtype=q.dtype, device=q.device).masked_fill(~allowed, float("-inf"))
    top = scores.detach().amax(-1, keepdim=True)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if options.sinks is not None:
        total = total + torch.exp(options.sinks[:, None, None] - top)
    return torch.einsum("hij,jhd->ihd", weights / total, v[:, key_head])


def with_gradients(attend: Callable[[], torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    # The output is followed by the gradients of a fixed random weighted sum of it.
    output = attend()
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return [output, *torch.autograd.grad(output, inputs, direction.to(output.device, output.dtype))]


def largest_errors(found: Iterable[torch.Tensor], truth: Iterable[torch.Tensor]) -> list[float]:
    return [(a.double() - b.double()).abs().max().item() for a, b in zip(found, truth)]


def doubled(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().double().requires_grad_()
