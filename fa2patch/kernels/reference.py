"""The reference, which every other kernel is compared with: attention by its definition, in pure torch.

It is not bit for bit what a document alone gives: documents of near length share a call (:mod:`.grouping`), padded to
the longest, and a matrix with more rows is multiplied in another order. Other tokens in another document change no bit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from .._torch import HAS_OPERATORS, SDPA, compiling, operator_later, uncompiled
from ..documents.boundaries import Boundaries
from .cascade import Cascade, CpuFlash, levels_of
from .grouping import calls_of_pairs, shared_calls
from .options import FEATURES, Options
from .protocol import Kernel


class Reference(Kernel):
    # The lengths of documents are needed on the host: on a GPU this is one read per forward, in a compiled graph one
    # per layer and direction. The cost grows with the sum of the squared lengths.

    name = "reference"
    what = "pure torch, documents of near length at a time"
    needs = "nothing"
    DEVICES = DTYPES = MAX_HEAD_DIM = None
    RUNS_ON = ()  # everywhere, and last
    MULTIPLE = 1
    GATHERS = False
    MASKS = True
    FEATURES = frozenset(FEATURES)

    def available(self) -> tuple[bool, str]:
        return True, ""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, boundaries: Boundaries, options: Options, scale: float
    ) -> torch.Tensor:
        # A graph holds the operator and does not break. It needs ``torch.library.custom_op``: before torch 2.4 the
        # graph breaks at each layer.
        if compiling() and HAS_OPERATORS:
            return operator(q, k, v, boundaries, options, scale)
        return over_documents(q, k, v, boundaries, options if options.scale == scale else replace(options, scale=scale))


@uncompiled
def over_documents(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, boundaries: Boundaries, options: Options
) -> torch.Tensor:
    # Returns ``[tokens, query heads, value dim]``.
    tree = boundaries.tree
    if tree is not None and CpuFlash.takes(q, k, v, options):
        flash = CpuFlash(tree.lengths, options.scale)
        return Cascade.apply(  # type: ignore[no-untyped-call,no-any-return]
            q, k, v, options.sinks, True, levels_of(boundaries), flash
        )
    if options.by_head:
        exact = torch.promote_types(q.dtype, torch.float32)  # in it, their gradients are added up over the calls
        options = options.with_heads(lambda by_head: by_head.to(exact))
    if boundaries.sources is not None:
        calls, of_keys, last = calls_of_pairs(boundaries, boundaries.sources, options.causal)
    else:
        calls, last = shared_calls(boundaries, q.shape[1] * q.shape[2], options.causal)
        of_keys = calls
    if tree is None:
        states = [calls.split(q), of_keys.split(k), of_keys.split(v)]
    else:  # a segment sees the keys of its path
        segments = range(len(tree.lengths))
        states = [calls.split(q), *([tree.along(x, segment)[None] for segment in segments] for x in (k, v))]
    called = zip(*states, last)
    outputs = [attend(queries, keys, values, options, seen).transpose(1, 2) for queries, keys, values, seen in called]
    return calls.join(outputs) if outputs else q.new_zeros(*q.shape[:2], v.shape[2])


# It is true from torch 2.5 on. Before, keys and values are repeated, which is costly with many short documents.
_SHARES_KEYS = "enable_gqa" in (F.scaled_dot_product_attention.__doc__ or "")


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, last: torch.Tensor | None = None
) -> torch.Tensor:
    # Documents of one length are computed at once. q is ``[documents, queries, query heads, head dim]``, and its last
    # query is at the last key; k and v are ``[documents, length, key heads, dim]``. ``last`` is the index of the last
    # key that each query sees, int64 ``[documents, queries]``, or None if the options say which keys a query sees.
    # Returns ``[documents, query heads, queries, value dim]`` of the values' dtype.
    query, key, value = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    queries, length, groups = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
    windowed = options.window is not None and options.window < length
    special = windowed or options.dropout  # the operator's backward repeats the dropout; sdpa's backends draw others
    plain = not special and options.softcap is None and options.sinks is None and options.alibi_slopes is None
    if plain and length == 1 and options.bias is None:
        return _OfOneKey.apply(query, key, value)  # type: ignore[no-untyped-call,no-any-return]
    asked: dict[str, Any] = {}
    if groups > 1 and plain and _SHARES_KEYS:
        asked["enable_gqa"] = True
    elif groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    # sdpa has a flash kernel on a CPU, too. All that is not plain takes the formula, in float32 or float64.
    if plain:
        every = last is None and not options.causal
        if options.bias is not None:
            own = _bias_of(options, queries, length).to(query.dtype)
            seen = None if every else _seen(_distances(queries, length, query.device), options, last)
            asked["attn_mask"] = own if seen is None else own.masked_fill(~seen, float("-inf"))
        elif every or (last is None and queries in (1, length)):
            asked["is_causal"] = options.causal and queries > 1
        else:
            asked["attn_mask"] = _seen(_distances(queries, length, query.device), options, last)
        return SDPA(query, key, value, scale=options.scale, **asked).to(value.dtype)
    with torch.autocast(query.device.type, enabled=False):
        weights = _weights(query, key, options, last)
        weights = F.dropout(weights, options.dropout) if options.dropout else weights
        return (weights @ value.to(weights.dtype)).to(value.dtype)


class _OfOneKey(torch.autograd.Function):
    # The weight of an only key is 1, so the output is its value. sdpa takes longer for thousands of documents of one
    # token than all else in a small layer. As in a padded batch, queries and keys get gradients, which are zeros.

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        ctx.shapes, ctx.groups = (query.shape, key.shape), query.shape[1] // key.shape[1]
        return value.repeat_interleave(ctx.groups, 1).expand(-1, -1, query.shape[2], -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        grad = grad.sum(2, keepdim=True) if grad.shape[2] > 1 else grad
        own = grad.view(*grad.shape[:1], -1, ctx.groups, *grad.shape[2:]).sum(2) if ctx.groups > 1 else grad
        nothing = grad.new_zeros(())
        return nothing.expand(ctx.shapes[0]), nothing.expand(ctx.shapes[1]), own


def _weights(query: torch.Tensor, key: torch.Tensor, options: Options, last: torch.Tensor | None) -> torch.Tensor:
    # ``[documents, heads, queries, length]`` before dropout, in float32 or better.
    assert options.scale is not None, "a kernel's call has settled it, before it pads head dimensions"
    precision = torch.promote_types(query.dtype, torch.float32)
    logits: torch.Tensor = query.to(precision) @ key.to(precision).transpose(-1, -2) * options.scale
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    if options.bias is not None:
        logits = logits + _bias_of(options, query.shape[2], key.shape[2]).to(precision)
    distance = _distances(query.shape[2], key.shape[2], query.device)
    if options.alibi_slopes is not None:
        logits = logits - options.alibi_slopes.to(precision)[:, None, None] * distance.abs()
    logits = logits.masked_fill(~_seen(distance, options, last), float("-inf"))
    if options.sinks is None:
        return logits.softmax(dim=-1)
    sink = options.sinks.to(precision)[:, None, None].expand(len(query), -1, query.shape[2], 1)
    return torch.cat([logits, sink], dim=-1).softmax(dim=-1)[..., :-1]


def _bias_of(options: Options, queries: int, keys: int) -> torch.Tensor:
    # [heads, queries, keys]. Queries that are fewer than their keys are at the end (of a tree's path), or of another
    # row, which sees all keys.
    assert options.bias is not None
    return options.bias[:, keys - queries if options.causal else 0 :, :keys][:, :queries]


def _distances(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    # ``query index - key index``, int64 ``[queries, keys]``. The last query is at the last key.
    index = torch.arange(keys, device=device)
    return torch.arange(keys - queries, keys, device=device)[:, None] - index


def _seen(distance: torch.Tensor, options: Options, last: torch.Tensor | None) -> torch.Tensor:
    # bool ``[queries, keys]``; with ``last`` it is ``[documents, 1, queries, keys]``.
    if last is not None:
        seen = torch.arange(distance.shape[1], device=distance.device) <= last[:, None, :, None]
    else:
        seen = distance >= 0 if options.causal else torch.ones_like(distance, dtype=torch.bool)
    return seen if options.window is None else seen & (distance.abs() < options.window)


# The inputs of the operator. Its backward has them after the gradient of the output.
_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor? cu_seqlens_k, Tensor? parents, Tensor? until, "
    "Tensor? sinks, Tensor? alibi_slopes, Tensor? bias, Tensor? seed, float scale, bool causal, int? window, "
    "float? softcap, float dropout"
)

_DIFFERENTIABLE = (0, 1, 2, 7, 8, 9)  # the places of q, k, v, sinks, slopes and the bias among the inputs


def _computed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, cu_seqlens_k: torch.Tensor | None,
    parents: torch.Tensor | None, until: torch.Tensor | None, sinks: torch.Tensor | None, slopes: torch.Tensor | None,
    bias: torch.Tensor | None, seed: torch.Tensor | None, *numbers: Any,
) -> torch.Tensor:  # fmt: skip
    options = replace(Options(*numbers), sinks=sinks, alibi_slopes=slopes, bias=bias)
    sources = None if cu_seqlens_k is None else Boundaries(cu_seqlens_k, 0)
    boundaries = Boundaries(cu_seqlens, 0, parents=parents, until=until, sources=sources)
    # With the seed, the backward drops the weights that the forward dropped.
    with torch.random.fork_rng([q.device] if q.device.type == "cuda" else [], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(int(seed))
        output = over_documents(q, k, v, boundaries, options)
    return output.contiguous()  # as _fake says: a graph reshapes it without a copy


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *unused: Any) -> torch.Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


def _backward(grad: torch.Tensor, *inputs: Any) -> list[torch.Tensor]:
    # The gradients come from a second run of the forward.
    given = list(inputs)
    for at in _DIFFERENTIABLE:
        given[at] = None if inputs[at] is None else inputs[at].detach().requires_grad_()
    # Inside an operator, torch excludes autograd. This lets it record there.
    guard, key = torch._C._SetExcludeDispatchKeyGuard, torch._C.DispatchKey
    with guard(key.AutogradFunctionality, False), guard(key.ADInplaceOrView, False), torch.enable_grad():
        output, wanted = _computed(*given), [given[at] for at in _DIFFERENTIABLE if given[at] is not None]
    return [found.contiguous() for found in torch.autograd.grad(output, wanted, grad)]


def _backward_fake(grad: torch.Tensor, *inputs: Any) -> list[torch.Tensor]:
    return [inputs[at].new_empty(inputs[at].shape) for at in _DIFFERENTIABLE if inputs[at] is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:11])
    ctx.numbers = inputs[11:]


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    inputs = (*ctx.saved_tensors, *ctx.numbers)
    found = iter(torch.ops.fa2patch.reference_backward.default(grad, *inputs))
    wanted = [at in _DIFFERENTIABLE and each is not None for at, each in enumerate(inputs)]
    return tuple([next(found) if each else None for each in wanted])


operator_later("reference", _computed, f"({_INPUTS}) -> Tensor", _fake, _gradients, _save)
operator_later("reference_backward", _backward, f"(Tensor grad, {_INPUTS}) -> Tensor[]", _backward_fake)


def operator(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, boundaries: Boundaries, options: Options, scale: float
) -> torch.Tensor:
    seed = torch.randint(2**31, (), device=q.device) if options.dropout else None
    ends = None if boundaries.sources is None else boundaries.sources.cu_seqlens
    attended: torch.Tensor = torch.ops.fa2patch.reference.default(
        q, k, v, boundaries.cu_seqlens, ends, boundaries.parents, boundaries.until, options.sinks,
        options.alibi_slopes, options.bias, seed, scale, options.causal, options.window, options.softcap,
        options.dropout,
    )  # fmt: skip
    return attended
