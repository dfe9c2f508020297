"""Kernels with one planted fault each, wrong as builds of flash attention have been: the trial must believe none.

Each fault computes what the reference computes, but for one thing. It is a function of the right computation, of q, k
and v, and of what else the kernel was handed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Callable

import torch

from fa2patch.documents.boundaries import Boundaries, document_of
from fa2patch.kernels import Options
from fa2patch.kernels.reference import Reference


@dataclass
class Handed:
    """What the kernel was handed besides q, k and v, and what its earlier calls left behind."""

    boundaries: Boundaries
    options: Options
    scale: float
    calls: int
    left: dict[str, Any] = field(default_factory=dict)

    def right(self, q, k, v, **changed):
        """What is right for these states, with changed ``boundaries`` or options."""
        boundaries = changed.pop("boundaries", self.boundaries)
        return Reference().attend(q, k, v, boundaries, replace(self.options, **changed), self.scale)

    @property
    def place(self):
        # Each token's place in its document, and the document's length: two tensors [tokens].
        cu = self.boundaries.cu_seqlens.long()
        document = document_of(cu, int(cu[-1]))
        return torch.arange(len(document)) - cu[document], cu.diff()[document]


class Planted(Reference):
    name = "planted"

    def __init__(self, fault: Callable[..., torch.Tensor]) -> None:
        self.fault, self.calls, self.left = fault, 0, {}

    def attend(self, q, k, v, boundaries, options, scale):
        self.calls += 1
        return self.fault(Handed(boundaries, options, scale, self.calls, self.left), q, k, v)


class _Backward(torch.autograd.Function):
    # The tensor as it is, with a changed gradient.

    @staticmethod
    def forward(ctx, tensor, change):
        ctx.change = change
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad):
        return ctx.change(grad), None


def off(share, where=None):
    # Changes a tensor [tokens, ...] by a share of it, in some of its tokens.

    def change(x):
        factor = torch.full(x.shape[:1], 1 + share) if where is None else 1 + share * where.to(x.dtype)
        return (x * factor.view(-1, *[1] * (x.dim() - 1))).to(x.dtype)

    return change


def in_last_tile(handed, tile):
    # A full last tile does not count.
    place, length = handed.place
    return (place >= length // tile * tile) & (length > tile)


def dense(handed, q, k, v, seen):
    # Causal attention. ``seen(query's place, key's place)`` says what else is seen or hidden.
    place, _ = handed.place
    document = document_of(handed.boundaries.cu_seqlens, len(q))
    mask = seen(place[:, None], place[None]) & (document[:, None] == document[None])
    keys, values = (x.float().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = torch.einsum("ihd,jhd->hij", q.float(), keys) * handed.scale
    weights = logits.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weights, values).to(q.dtype)


def large(x, at=8.0):
    return x.detach().abs().flatten(1).amax(1) > at


def of_equal_keys(handed, k):
    # Tokens of a document of several tokens whose keys are all equal.
    cu = handed.boundaries.cu_seqlens.tolist()
    equal = torch.zeros(len(k), dtype=torch.bool)
    for a, b in zip(cu, cu[1:]):
        equal[a:b] = b - a > 1 and bool((k[a:b] == k[a : a + 1]).all())
    return equal


def _overflows(handed, q, k, v):
    # Softmax without the maximum taken off: ``exp`` of a logit above 88 is infinite in float32.
    keys = k.detach().float().repeat_interleave(q.shape[1] // k.shape[1], 1)
    top = (torch.einsum("ihd,ihd->ih", q.detach().float(), keys) * handed.scale).amax(1)
    return handed.right(q, k, v) * torch.where(top > 88, float("nan"), 1.0).to(q.dtype)[:, None, None]


def _grouped_in_another_order(handed, q, k, v):
    # Query head h gets the gradient of key head ``h % key heads``.
    heads, groups = k.shape[1], q.shape[1] // k.shape[1]
    order = torch.arange(q.shape[1]).view(heads, groups).T.flatten()
    wrong = handed.right(q[:, order], k, v)[:, order.argsort()]
    return wrong + (handed.right(q, k, v) - wrong).detach()


def _raises_with_groups(grad, groups):
    if groups > 1:
        raise RuntimeError("dk must have shape (total_k, num_heads, head_size)")
    return grad


def _first_of_group_only(handed, q, k, v):
    # The gradients of keys and values forget all but the first query head of a group.
    groups = q.shape[1] // k.shape[1]
    first = (torch.arange(q.shape[1]) % groups == 0)[None, :, None]
    of_first, right = handed.right(q.detach(), k, v), handed.right(q, k.detach(), v.detach())
    return right + torch.where(first, of_first, of_first.detach()) - of_first.detach()


def _as_before(handed, q, k, v):
    # From the second call on, the kernel takes the documents of the first.
    first = handed.left.setdefault("boundaries", handed.boundaries)
    return handed.right(q, k, v, boundaries=first)


def _flat(x):
    # A kernel reads these values if it takes a tensor for contiguous.
    return x.as_strided(x.shape, torch.empty(x.shape).stride(), x.storage_offset())


def _from_the_start(x):
    # A kernel reads these values if it begins at the start of a tensor's memory.
    return x.as_strided(x.shape, x.stride(), 0)


def _as_bfloat16(sinks):
    read = sinks.detach().contiguous().view(torch.bfloat16)[: len(sinks)]
    return (sinks - sinks.detach()) + read.nan_to_num(0.0, 4.0, -4.0).clamp(-4, 4).to(sinks.dtype)


def _change(which, change):
    # A fault in the gradient of q, k or v. ``change(handed)`` returns the function that changes it.

    def fault(handed, *states):
        states = list(states)
        states[which] = _Backward.apply(states[which], change(handed))
        return handed.right(*states)

    return fault


def _output(change):
    # A fault in the output, in the forward alone. ``change(handed, q, k, v)`` returns the function that changes it.

    def fault(handed, q, k, v):
        right = handed.right(q, k, v)
        return right + (change(handed, q, k, v)(right) - right).detach()

    return fault


def _clamped(x, at=8.0):
    return x + (x.clamp(-at, at) - x).detach()


# These are faults in plain attention, also without groups of query heads.
FAULTS = {
    "large queries cut off": lambda handed, q, k, v: handed.right(_clamped(q), k, v),
    "large keys cut off": lambda handed, q, k, v: handed.right(q, _clamped(k), v),
    "large values cut off": lambda handed, q, k, v: handed.right(q, k, _clamped(v)),
    "large gradients cut off": lambda handed, q, k, v: _Backward.apply(
        handed.right(q, k, v), lambda grad: grad.clamp(-8, 8)
    ),
    "large queries 10 % off": _output(lambda handed, q, k, v: off(0.1, large(q))),
    "no maximum taken off": _overflows,
    "output 10 % off in the last tile of 64": _output(lambda handed, *states: off(0.1, in_last_tile(handed, 64))),
    "output 10 % off in the last tile of 128": _output(lambda handed, *states: off(0.1, in_last_tile(handed, 128))),
    "output 10 % off at the last token": _output(
        lambda handed, *states: off(0.1, torch.arange(len(states[0])) == len(states[0]) - 1)
    ),
    "output 5 % off beyond the 129th token": _output(lambda handed, *states: off(0.05, handed.place[0] >= 129)),
    "output 5 % off in one head": _output(
        lambda handed, *states: lambda x: x * torch.tensor([1.0] * (x.shape[1] - 1) + [0.95])[:, None]
    ),
    "output 5 % off": _output(lambda handed, *states: off(0.05)),
    "equal keys 10 % off": _output(lambda handed, q, k, v: off(0.1, of_equal_keys(handed, k))),
    "dk of equal keys 10 % off": lambda handed, q, k, v: handed.right(
        q, _Backward.apply(k, off(0.1, of_equal_keys(handed, k))), v
    ),
    "constant rows 10 % off": _output(
        lambda handed, q, k, v: off(0.1, (q == q[..., :1]).flatten(1).all(1))
    ),
    "the end of a tile sees one key more": lambda handed, q, k, v: dense(
        handed, q, k, v, lambda i, j: (j <= i) | ((j == i + 1) & (i % 64 == 63))
    ),
    "the start of a tile misses one key": lambda handed, q, k, v: dense(
        handed, q, k, v, lambda i, j: (j <= i) & ~((j == i - 1) & (i % 64 == 0))
    ),
    "the last query misses its own key": lambda handed, q, k, v: dense(
        handed, q, k, v, lambda i, j: (j <= i) & ~((j == i) & (i > 0) & (i == handed.place[1][:, None] - 1))
    ),
    "dq 5 % off": _change(0, lambda handed: off(0.05)),
    "dk 5 % off": _change(1, lambda handed: off(0.05)),
    "dv 5 % off": _change(2, lambda handed: off(0.05)),
    "dq 10 % off in the last tile": _change(0, lambda handed: off(0.1, in_last_tile(handed, 128))),
    "dk 10 % off in the last tile": _change(1, lambda handed: off(0.1, in_last_tile(handed, 128))),
    "dv 10 % off in the last tile": _change(2, lambda handed: off(0.1, in_last_tile(handed, 128))),
    "dk 5 % off beyond the 129th token": _change(1, lambda handed: off(0.05, handed.place[0] >= 129)),
    "no dk in the last tile": _change(1, lambda handed: off(-1.0, in_last_tile(handed, 128))),
    "from the second call on, output 10 % off": _output(lambda handed, *states: off(0.1 * (handed.calls > 1))),
    "from the second call on, dk 10 % off": _change(1, lambda handed: off(0.1 * (handed.calls > 1))),
    "from the second call on, the first call's documents": _as_before,
    "queries taken for contiguous": lambda handed, q, k, v: handed.right(q + (_flat(q) - q).detach(), k, v),
    "keys taken for contiguous": lambda handed, q, k, v: handed.right(q, k + (_flat(k) - k).detach(), v),
    "values read from the start of memory": lambda handed, q, k, v: handed.right(
        q, k, v + (_from_the_start(v) - v).detach()
    ),
    "gradient taken for contiguous": lambda handed, q, k, v: _Backward.apply(handed.right(q, k, v), _flat),
}  # fmt: skip

# These are no faults without groups of query heads.
WITH_GROUPS = {
    "dk in another order": _grouped_in_another_order,
    "dk of the first head only": _first_of_group_only,
    "no backward": lambda handed, q, k, v: handed.right(
        q, _Backward.apply(k, lambda grad: _raises_with_groups(grad, q.shape[1] // k.shape[1])), v
    ),
    "dk 10 % off": lambda handed, q, k, v: handed.right(q, _Backward.apply(k, off(0.1 * (q.shape[1] > k.shape[1]))), v),
}

WITH_SINKS = {
    "sinks of float32 read as bfloat16": lambda handed, q, k, v: handed.right(
        q, k, v, sinks=handed.options.sinks if handed.options.sinks.dtype == q.dtype
        else _as_bfloat16(handed.options.sinks)
    ),
    "sinks 10 % off beside bfloat16": lambda handed, q, k, v: handed.right(
        q, k, v, sinks=handed.options.sinks * (0.9 if q.dtype == torch.bfloat16 else 1.0)
    ),
    "sinks of another dtype than q refused": lambda handed, q, k, v: handed.right(
        q, k, v, sinks=_same_dtype(handed.options.sinks, q)
    ),
    "gradient of sinks 10 % off": lambda handed, q, k, v: handed.right(
        q, k, v, sinks=_Backward.apply(handed.options.sinks, off(0.1))
    ),
    "no sinks in the last tile": lambda handed, q, k, v: torch.where(
        in_last_tile(handed, 128)[:, None, None], handed.right(q, k, v, sinks=None), handed.right(q, k, v)
    ),
}  # fmt: skip


def _same_dtype(sinks, q):
    if sinks.dtype != q.dtype:
        raise RuntimeError("sinks must have the dtype of q")
    return sinks
