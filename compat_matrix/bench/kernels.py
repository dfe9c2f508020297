"""Part ``kernels``: attention that keeps to documents, computed four ways, as a row's documents get more and shorter.

One row of fixed length; 8 query and 2 key heads of 64 dimensions, float32, causal. What is timed is attention alone:
the block-diagonal mask of the masked rival and the offsets of the jagged one are made beforehand. The padded rival pads
and unpads within the time, as the road from packed to padded rows and back must. Where torch has no backend for causal
jagged attention its error is kept, and the jagged rival is timed not causal, beside the reference not causal.
"""

from __future__ import annotations

import logging
from typing import Any, Callable

import torch
import torch.nn.functional as F
from rich.progress import Progress

from fa2patch.documents.boundaries import Boundaries, boundaries
from fa2patch.kernels.attention import Options
from fa2patch.kernels.reference import Reference

from . import timing
from .lengths import FLAN, filled, scores

HEADS, KEY_HEADS, DIM = 8, 2, 64
TOKENS, QUICK_TOKENS = 2048, 64

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""q, k and v ``[tokens, heads, dim]`` -> the same of q."""


def measure(progress: Progress, quick: bool = False, repeats: int = 9) -> Any:
    logging.getLogger("torch.nested").setLevel(logging.ERROR)  # the error says as much
    rows = layouts(QUICK_TOKENS if quick else TOKENS)
    repeats = 1 if quick else repeats
    task = progress.add_task("kernels", total=len(rows))
    found = []
    for name, lengths in rows.items():
        found.append({"row": name, **row(lengths, repeats)})
        progress.update(task, advance=1)
    tokens = sum(next(iter(rows.values())))
    heads = {"query_heads": HEADS, "key_heads": KEY_HEADS, "head_dim": DIM, "dtype": "float32"}
    return {"tokens": tokens, **heads, "repeats": repeats, "rows": found}


def layouts(tokens: int) -> dict[str, list[int]]:
    """The same tokens as 1, 2, 4, ... documents of one length, and as documents of many lengths."""
    counts = [2**power for power in range(7) if 2**power <= tokens // 2]
    equal = {f"{count} x {tokens // count}": [tokens // count] * count for count in counts}
    return {**equal, FLAN.name: filled(FLAN.scaled(tokens / 2048), tokens)}


def row(lengths: list[int], repeats: int) -> dict[str, Any]:
    """Times of all rivals for one row, forward and with backward, and how far each is from the reference."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(lengths), heads, DIM, generator=generator) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    found: dict[str, Any] = {
        "documents": len(lengths),
        "longest": max(lengths),
        "scores": scores(lengths),
        "padded_scores": len(lengths) * max(lengths) ** 2,
    }
    found["causal"], errors = _timed(rivals(lengths, causal=True), q, k, v, repeats)
    if "jagged" in errors:
        found["jagged_causal_error"] = errors["jagged"]
        both = {name: rival for name, rival in rivals(lengths, causal=False).items() if name in ("reference", "jagged")}
        found["not_causal"], errors = _timed(both, q, k, v, repeats)
        if errors:
            found["jagged_error"] = errors["jagged"]
    return found


def rivals(lengths: list[int], causal: bool) -> dict[str, Attention]:
    """The reference first; without a causal mask padding would be seen, so that there is no padded one."""
    found = {
        "reference": reference(lengths, causal),
        "block mask": block_mask(lengths, causal),
        "jagged": jagged(lengths, causal),
    }
    return {**found, "padded": padded(lengths)} if causal else found


def _timed(
    attentions: dict[str, Attention], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, repeats: int
) -> tuple[dict[str, Any], dict[str, str]]:
    """Times, and the errors of those that cannot compute this."""
    truth = attentions["reference"](q, k, v)
    able, errors, away = {}, {}, {}
    for name, attention in attentions.items():
        try:
            away[name] = float((attention(q, k, v) - truth).abs().max())
            _with_backward(attention, q, k, v)()
            able[name] = attention
        except (RuntimeError, NotImplementedError, ValueError) as error:
            errors[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    forward = timing.rounds({name: _forward(attention, q, k, v) for name, attention in able.items()}, repeats)
    both = timing.rounds({name: _with_backward(attention, q, k, v) for name, attention in able.items()}, repeats)
    return {
        name: {
            "forward": timing.summary(forward[name]),
            "forward_backward": timing.summary(both[name]),
            "away_from_reference": away[name],
        }
        for name in able
    }, errors


def _forward(attention: Attention, *states: torch.Tensor) -> Callable[[], Any]:
    def call() -> Any:
        with torch.no_grad():
            return attention(*states)

    return call


def _with_backward(attention: Attention, *states: torch.Tensor) -> Callable[[], Any]:
    leaves = [tensor.detach().requires_grad_() for tensor in states]
    gradient = torch.ones_like(states[0])

    def call() -> Any:
        return torch.autograd.grad(attention(*leaves), leaves, gradient)

    return call


def ready(lengths: list[int]) -> Boundaries:
    return boundaries(torch.cat([torch.arange(length) for length in lengths])[None])


def reference(lengths: list[int], causal: bool) -> Attention:
    kernel, cuts, options = Reference(), ready(lengths), Options(causal=causal)
    return lambda q, k, v: kernel(q, k, v, cuts, options)


def block_mask(lengths: list[int], causal: bool) -> Attention:
    """Every score of the row is computed, most of them to be masked."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = document[:, None] == document
    mask = mask.tril() if causal else mask

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (states.transpose(0, 1)[None] for states in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1)

    return attention


def padded(lengths: list[int]) -> Attention:
    """A row for each document, as long as the longest; on the right, so that causal attention never sees padding."""
    shape = len(lengths), max(lengths)
    places = torch.cat([torch.arange(length) + row * shape[1] for row, length in enumerate(lengths)])

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (_spread(states, places, shape).transpose(1, 2) for states in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)[places]

    return attention


def _spread(states: torch.Tensor, places: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    rows = states.new_zeros(shape[0] * shape[1], *states.shape[1:]).index_copy(0, places, states)
    return rows.view(*shape, *states.shape[1:])


def jagged(lengths: list[int], causal: bool) -> Attention:
    offsets = torch.tensor([0, *lengths]).cumsum(0)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = (states.repeat_interleave(groups, 1) for states in (k, v))
        q, k, v = (
            torch.nested.nested_tensor_from_jagged(
                states, offsets, min_seqlen=min(lengths), max_seqlen=max(lengths)
            ).transpose(1, 2)
            for states in (q, k, v)
        )
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).values()

    return attention
