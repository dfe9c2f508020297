"""CPU implementations of the aten operators below two kernels, for machines without a GPU.

torch implements these operators for CUDA only. Their schemas, autograd and compiler support stay torch's own. The
values follow the formulas of the CUDA code (FlashAttention-2, arXiv 2307.08691, algorithm 2): the backward takes the
output and the log-sum-exp as arguments, so a caller may pass others than the forward returned.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from fa2patch.kernels.aten import Efficient, TorchVarlen

CALLS: list[dict[str, Any]] = []  # some arguments of every forward, for tests that inspect them


@contextlib.contextmanager
def installed(padded: bool = False) -> Iterator[list[dict[str, Any]]]:
    # Both kernels run on a CPU in every dtype within the block, which is given the calls of their forwards.
    # ``padded``: the log-sum-exp of flash attention is [documents, heads, longest], as up to torch 2.6 and in builds
    # for ROCm, and not [heads, tokens].
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", _padded_forward if padded else _flash_forward, "CPU")
    library.impl("_flash_attention_backward", _padded_backward if padded else _flash_backward, "CPU")
    library.impl("_efficient_attention_forward", _efficient_forward, "CPU")
    library.impl("_efficient_attention_backward", _efficient_backward, "CPU")
    everywhere = {"DEVICES": None, "DTYPES": None, "available": lambda self: (True, "")}
    CALLS.clear()
    with contextlib.ExitStack() as stack:
        stack.callback(library._destroy)
        for kernel in (TorchVarlen, Efficient):
            stack.enter_context(mock.patch.multiple(kernel, **everywhere))
        yield CALLS


def _pieces(cu: torch.Tensor, cu_k: torch.Tensor) -> list[tuple[slice, slice]]:
    # The queries and the keys of every document that has both.
    pairs = zip(_documents(cu), _documents(cu_k))
    return [(mine, seen) for mine, seen in pairs if mine.start < mine.stop and seen.start < seen.stop]


def _documents(cu: torch.Tensor) -> list[slice]:
    return list(itertools.starmap(slice, zip(cu.tolist(), cu.tolist()[1:])))


def _weights(
    q: torch.Tensor, k: torch.Tensor, scale: float, causal: bool, left: int | None, right: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    # The float64 logits [heads, queries, keys], minus infinity where hidden, and their log-sum-exp. The last query is
    # at the last key, as in FlashAttention from 2.1 on.
    keys = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    logits = torch.einsum("ihd,jhd->hij", q.double(), keys) * scale
    distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left is not None and left >= 0:
        hidden |= distance > left
    if causal:
        hidden |= distance < 0
    elif right is not None and right >= 0:
        hidden |= -distance > right
    logits = logits.masked_fill(hidden, float("-inf"))
    return logits, logits.logsumexp(-1)


def _flash_forward(
    q, k, v, cu, cu_k, max_q, max_k, dropout, causal, debug, *, scale=None, window_size_left=None,
    window_size_right=None, **unused,
):  # fmt: skip
    assert dropout == 0 and cu.dtype == torch.int32 and all(x.stride(-1) == 1 for x in (q, k, v))
    assert int(cu.diff().max()) <= max_q and int(cu_k.diff().max()) <= max_k, "a document longer than the longest"
    CALLS.append({"cu": cu, "max": max_q, "left": window_size_left, "right": window_size_right})
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32))
    output = torch.empty_like(q)
    for at, keys in _pieces(cu, cu_k):
        logits, sums = _weights(q[at], k[keys], scale, causal, window_size_left, window_size_right)
        values = v[keys].double().repeat_interleave(q.shape[1] // k.shape[1], 1)
        output[at] = torch.einsum("hij,jhd->ihd", (logits - sums[..., None]).exp(), values).to(q.dtype)
        lse[:, at] = sums.to(lse.dtype)
    on_meta = (x.to("meta") for x in (q, k, v, cu, cu_k))
    made = torch.ops.aten._flash_attention_forward.default(*on_meta, max_q, max_k, dropout, causal, debug)
    # the meta implementation gives the shapes of the other outputs in this torch
    return output, lse, *(torch.zeros_like(x, device="cpu") for x in made[2:])


def _flash_backward(
    grad, q, k, v, output, lse, cu, cu_k, max_q, max_k, dropout, causal, state, unused, *, scale=None,
    window_size_left=None, window_size_right=None,
):  # fmt: skip
    scale, groups = q.shape[-1] ** -0.5 if scale is None else scale, q.shape[1] // k.shape[1]
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    for at, seen in _pieces(cu, cu_k):
        logits, _ = _weights(q[at], k[seen], scale, causal, window_size_left, window_size_right)
        weights = (logits - lse[:, at, None].double()).exp()
        keys, values = (x[seen].double().repeat_interleave(groups, 1) for x in (k, v))
        of_output = grad[at].double()
        drawn = (of_output * output[at].double()).sum(-1).transpose(0, 1)
        of_logits = weights * (torch.einsum("ihd,jhd->hij", of_output, values) - drawn[..., None]) * scale
        grads[0][at] = torch.einsum("hij,jhd->ihd", of_logits, keys).to(q.dtype)
        for made, found in (
            (grads[1], torch.einsum("hij,ihd->jhd", of_logits, q[at].double())),
            (grads[2], torch.einsum("hij,ihd->jhd", weights, of_output)),
        ):
            made[seen] = found.unflatten(1, (k.shape[1], groups)).sum(2).to(q.dtype)
    return tuple(grads)


def _padded_forward(q, k, v, cu, cu_k, max_q, *more, **options):
    output, lse, *rest = _flash_forward(q, k, v, cu, cu_k, max_q, *more, **options)
    padded = lse.new_full((len(cu) - 1, q.shape[1], max_q), float("inf"))
    for row, at in zip(padded, _documents(cu)):
        row[:, : at.stop - at.start] = lse[:, at]
    return output, padded, *rest


def _padded_backward(grad, q, k, v, output, lse, cu, cu_k, max_q, *more, **options):
    assert lse.shape == (len(cu) - 1, q.shape[1], max_q)
    rows = [row[:, : at.stop - at.start] for row, at in zip(lse, _documents(cu))]
    return _flash_backward(grad, q, k, v, output, torch.cat(rows, 1), cu, cu_k, max_q, *more, **options)


def _efficient_forward(q, k, v, bias, cu, cu_k, max_q, max_k, dropout, mask, lse=False, *, scale=None, **unused):
    assert q.shape[2] == k.shape[2], "the CUTLASS kernel wants as many key as query heads"
    causal = _causal(mask, cu, cu_k)
    output, sums, *_ = _flash_forward(q[0], k[0], v[0], cu, cu_k, max_q, max_k, dropout, causal, False, scale=scale)
    empty = torch.empty((), dtype=torch.int64)
    return output[None], sums[None], empty, empty, max_q, max_k


def _efficient_backward(
    grad, q, k, v, bias, output, cu, cu_k, max_q, max_k, lse, dropout, seed, offset, mask, of_bias, *, scale=None,
    **unused,
):  # fmt: skip
    rows = (x[0] for x in (grad, q, k, v, output, lse))
    causal = _causal(mask, cu, cu_k)
    grads = _flash_backward(*rows, cu, cu_k, max_q, max_k, 0.0, causal, seed, offset, scale=scale)
    return (*(x[None] for x in grads), torch.empty(0))


def _causal(mask: int, cu: torch.Tensor, cu_k: torch.Tensor) -> bool:
    # ``custom_mask_type`` 1 counts from the first key, 2 from the last, which is modelled here.
    assert mask in (0, 2) or torch.equal(cu, cu_k), "counted from the first key, the last query is not at the last key"
    return mask != 0
