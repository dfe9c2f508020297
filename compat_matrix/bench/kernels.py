"""Part ``kernels``: isolated attention computed in several ways, as the documents of a row become more and shorter.

One row of fixed length; 8 query and 2 key heads of 64 dimensions, float32, causal. Only attention is timed: the
block-diagonal mask and the offsets of the jagged tensor are made beforehand. The padded rival is timed with padding and
unpadding, because a packed row has to be converted both ways. Where torch has no backend for causal jagged attention,
its error is kept, and the jagged rival and the reference are timed without the causal mask.
"""

from __future__ import annotations

import logging
import statistics
from typing import Any, Callable

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import Progress

from fa2patch.documents.boundaries import Boundaries
from fa2patch.documents.recognition import boundaries
from fa2patch.kernels.attention import Options
from fa2patch.kernels.reference import Reference

from . import timing
from .lengths import FLAN, cut, filled, scores

HEADS, KEY_HEADS, DIM = 8, 2, 64
TOKENS, QUICK_TOKENS = 2048, 64
MOST_JAGGED = 64
"""The jagged way takes seconds for more documents."""
MOST_PADDING = 16
"""A padded batch of more times the row's tokens is not measured: it would take most of the part's time."""

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps q, k and v ``[tokens, heads, dim]`` to an output of q's shape."""


def measure(progress: Progress, quick: bool = False, repeats: int = 9) -> Any:
    """Measure all rows and return the result of the part."""
    logging.getLogger("torch.nested").setLevel(logging.ERROR)  # the error has the same information
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
    """Return lengths by name: the same tokens as 1, 2, 4, ... equal documents, and as documents of many lengths."""
    counts = [2**power for power in range(tokens.bit_length()) if 2**power <= tokens]
    equal = {f"{count} x {tokens // count}": [tokens // count] * count for count in counts}
    drawn, most = np.random.default_rng(0), min(64, tokens // 4)
    uniform = [int(length) for length in drawn.integers(1, most, tokens, endpoint=True)]
    two = [int(length) for length in drawn.choice([4, tokens // 8], tokens, p=[0.9, 0.1])]
    return {
        **equal,
        FLAN.name: filled(FLAN.scaled(tokens / 2048), tokens),
        "FLAN-like, a tenth": filled(FLAN.scaled(tokens / 20480), tokens),
        f"uniform, 1 to {most}": cut(uniform, tokens),
        f"4 or {tokens // 8}": cut(two, tokens),
    }


def row(lengths: list[int], repeats: int) -> dict[str, Any]:
    """Return all rivals' times for one row, forward and with backward, and their distance from the reference."""
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
    """Return the rivals, the reference first. There is no padded one without a causal mask, as it would see padding.

    The padded one is left out, too, where it would hold :data:`MOST_PADDING` times the row's tokens.
    """
    found = {
        "reference": reference(lengths, causal),
        "one by one": one_by_one(lengths, causal),
        "block mask": block_mask(lengths, causal),
    }
    if len(lengths) <= MOST_JAGGED:
        found["jagged"] = jagged(lengths, causal)
    if len(set(lengths)) == 1:
        found["batched"] = batched(lengths[0], causal)
    if causal and len(lengths) * max(lengths) <= MOST_PADDING * sum(lengths):
        found["padded"] = padded(lengths)
    return found


def _timed(
    attentions: dict[str, Attention], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, repeats: int
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the times of the rivals that can compute this row, and the errors of the others."""
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
            "forward": _summary(forward, name),
            "forward_backward": _summary(both, name),
            "away_from_reference": away[name],
        }
        for name in able
    }, errors


def _summary(taken: dict[str, list[float]], name: str) -> dict[str, float]:
    """Times in milliseconds, and the median over the rounds of this rival's time divided by the reference's."""
    ratios = [own / reference for own, reference in zip(taken[name], taken["reference"])]
    return {**timing.summary(taken[name]), "to_reference": round(statistics.median(ratios), 3)}


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
    """Return boundaries for documents of these lengths."""
    return boundaries(torch.cat([torch.arange(length) for length in lengths])[None])


def reference(lengths: list[int], causal: bool) -> Attention:
    """Attention by fa2patch's reference kernel."""
    kernel, cuts, options = Reference(), ready(lengths), Options(causal=causal)
    return lambda q, k, v: kernel(q, k, v, cuts, options)


def one_by_one(lengths: list[int], causal: bool) -> Attention:
    """SDPA called by hand for each document."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        documents = zip(*(torch.split(states, lengths) for states in (q, k, v)))
        return torch.cat([_attended([states[None] for states in document], causal)[0] for document in documents])

    return attention


def batched(length: int, causal: bool) -> Attention:
    """SDPA called by hand for a batch of documents of one length."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        batch = [states.view(-1, length, *states.shape[1:]) for states in (q, k, v)]
        return _attended(batch, causal).flatten(0, 1)

    return attention


def _attended(batch: list[torch.Tensor], causal: bool) -> torch.Tensor:
    q, k, v = (states.transpose(1, 2) for states in batch)
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)


def block_mask(lengths: list[int], causal: bool) -> Attention:
    """SDPA with a block-diagonal mask. It computes every score of the row, although most are masked."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = document[:, None] == document
    mask = mask.tril() if causal else mask

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (states.transpose(0, 1)[None] for states in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1)

    return attention


def padded(lengths: list[int]) -> Attention:
    """SDPA with one row for each document, padded on the right, so that causal attention never sees padding."""
    shape = len(lengths), max(lengths)
    places = torch.cat([torch.arange(length) + row * shape[1] for row, length in enumerate(lengths)])

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        batch = [_spread(states, places, shape) for states in (q, k, v)]
        return _attended(batch, causal=True).flatten(0, 1)[places]

    return attention


def _spread(states: torch.Tensor, places: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    rows = states.new_zeros(shape[0] * shape[1], *states.shape[1:]).index_copy(0, places, states)
    return rows.view(*shape, *states.shape[1:])


def jagged(lengths: list[int], causal: bool) -> Attention:
    """SDPA on jagged nested tensors, with the key heads repeated."""
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
