"""The reference, which every other kernel is compared with: :mod:`.reference_math` on every device and dtype.

While a graph is captured, it is the operator ``fa2patch::reference``, so that a compiled model has no graph break. This
needs ``torch.library.custom_op``, which torch has from 2.4 on. With older versions the graph breaks at each layer.

It is not bit for bit what a document alone gives: documents of near length share a call, padded to the longest, and a
matrix with more rows is multiplied in another order. Other tokens in another document change no bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Callable

import torch
import torch.nn.functional as F

from .._torch import HAS_OPERATORS, compiling, uncompiled
from ..documents.boundaries import Boundaries
from .aten import CpuFlash
from .cascade import Cascade, levels_of
from .protocol import FEATURES, Kernel, Options
from .reference_math import Call, attention_weights, divided, heads_first, over_documents


class Reference(Kernel):
    """Loops over the documents of a batch, or over the segments of a tree.

    It needs their lengths on the host: on a GPU one read per forward, in a compiled graph one per layer and direction.
    """

    name = "reference"
    what = "pure torch, documents of near length at a time"
    needs = "nothing"
    DEVICES = DTYPES = MAX_HEAD_DIM = None
    MULTIPLE = 1
    GATHERS = False
    MASKS = True
    FEATURES = frozenset(FEATURES)

    def available(self) -> tuple[bool, str]:
        """Always ``(True, "")``."""
        return True, ""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, boundaries: Boundaries, options: Options, scale: float
    ) -> torch.Tensor:
        """Run the operator while a graph is captured, else the formula."""
        if compiling() and operator is not None:
            return operator(q, k, v, boundaries, options, scale)
        return _eagerly(q, k, v, boundaries, replace(options, scale=scale))


@uncompiled
def _eagerly(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, boundaries: Boundaries, options: Options
) -> torch.Tensor:
    if boundaries.tree is None or not CpuFlash.takes(q, k, v, options):
        return over_documents(q, k, v, boundaries, options)
    assert options.scale is not None
    flash = CpuFlash(boundaries.tree.lengths, options.scale)
    output: torch.Tensor = Cascade.apply(  # type: ignore[no-untyped-call]
        q, k, v, options.sinks, True, levels_of(boundaries), flash
    )
    return output


def _differentiated(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, boundaries: Boundaries, options: Options
) -> list[torch.Tensor]:
    """The gradients of q, k, v, and of sinks and slopes if given. Autograd does not reach into an operator."""
    groups = q.shape[1] // k.shape[1]
    extras = [x for x in (options.sinks, options.alibi_slopes) if x is not None]
    of_extras = [x.new_zeros(x.shape, dtype=torch.promote_types(q.dtype, torch.float32)) for x in extras]
    layout, each_call = divided(q, k, v, boundaries, options)
    of_calls = zip(each_call, layout.split(grad))
    pieces = [_of_call(call, of_output, groups, options, of_extras) for call, of_output in of_calls]
    queries, keys, values = zip(*pieces)
    whole = [layout.join(queries), layout.summed(keys), layout.summed(values)]
    whole[1:] = [x.view(x.shape[0], -1, groups, x.shape[2]).sum(2) for x in whole[1:]]
    of_given = [found.to(given.dtype) for found, given in zip(of_extras, extras)]
    return [x.to(q.dtype).contiguous() for x in whole] + of_given


def _of_call(
    call: Call, of_output: torch.Tensor, groups: int, options: Options, of_extras: list[torch.Tensor]
) -> list[torch.Tensor]:
    """The gradients of a call's q, and of its k and v for each query head. Those of sinks and slopes are added up."""
    assert options.scale is not None, "it is one of the operator's inputs"
    query, key, value = heads_first(call, groups)
    weights, distance, capped = attention_weights(query, key, options, call.last)
    query, key, value, of_output = (x.to(weights.dtype) for x in (query, key, value, of_output.transpose(1, 2)))
    kept = F.dropout(torch.ones_like(weights), options.dropout) if options.dropout else None
    of_value = (weights if kept is None else weights * kept).transpose(2, 3) @ of_output
    of_weights = of_output @ value.transpose(2, 3)
    of_weights = of_weights if kept is None else of_weights * kept
    drawn = (of_weights * weights).sum(-1, keepdim=True)
    of_logits = weights * (of_weights - drawn)
    extras = iter(of_extras)
    if options.sinks is not None:
        next(extras).sub_(((1 - weights.sum(-1)) * drawn[..., 0]).sum((0, 2)))
    if options.alibi_slopes is not None:
        next(extras).sub_((of_logits * distance.abs()).sum((0, 2, 3)))
    of_logits = (of_logits if capped is None else of_logits * (1 - capped.square())) * options.scale
    return [x.transpose(1, 2) for x in (of_logits @ key, of_logits.transpose(2, 3) @ query, of_value)]


@contextlib.contextmanager
def _seeded(seed: torch.Tensor | None, device: torch.device) -> Iterator[None]:
    """Seed dropout, because the backward recomputes the weights and must drop the same ones."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int(seed))
        yield


_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor? parents, Tensor? until, Tensor? sinks, "
    "Tensor? alibi_slopes, Tensor? seed, float scale, bool causal, int? window, float? softcap, float dropout"
)
"""The inputs of the operator and, behind the gradient of its output, of its backward.

The schema is written out, because torch 2.4 cannot infer it from annotations that are strings.
"""
_SEED = 5
"""The place of the seed among the inputs behind q, k and v."""


def _carried(
    cu_seqlens: torch.Tensor, parents: torch.Tensor | None, until: torch.Tensor | None, sinks: torch.Tensor | None,
    slopes: torch.Tensor | None, seed: torch.Tensor | None, *numbers: Any,
) -> tuple[Boundaries, Options]:  # fmt: skip
    """The boundaries and the options of the operator's inputs behind q, k and v."""
    options = replace(Options(*numbers), sinks=sinks, alibi_slopes=slopes)
    return Boundaries(cu_seqlens, 0, parents=parents, until=until), options


operator: Callable[..., torch.Tensor] | None = None
"""Called as ``operator(q, k, v, boundaries, options, scale)``, like ``Reference.attend``; None before torch 2.4."""

if HAS_OPERATORS:

    @torch.library.custom_op("fa2patch::reference", mutates_args=(), schema=f"({_INPUTS}) -> Tensor")
    def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: Any) -> torch.Tensor:
        with _seeded(more[_SEED], q.device):
            return over_documents(q, k, v, *_carried(*more))

    @_forward.register_fake
    def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *unused: Any) -> torch.Tensor:
        return q.new_empty(q.shape[0], q.shape[1], v.shape[2])

    @torch.library.custom_op(
        "fa2patch::reference_backward", mutates_args=(), schema=f"(Tensor grad, {_INPUTS}) -> Tensor[]"
    )
    def _backward(
        grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: Any
    ) -> list[torch.Tensor]:
        with _seeded(more[_SEED], q.device):
            return _differentiated(grad, q, k, v, *_carried(*more))

    @_backward.register_fake
    def _(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: Any) -> list[torch.Tensor]:
        states = [x.new_empty(x.shape) for x in (q, k, v)]
        return states + [torch.empty_like(x) for x in more[3:5] if x is not None]  # sinks and slopes

    def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs[:9])
        ctx.numbers = inputs[9:]

    def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        found = iter(_backward(grad, *ctx.saved_tensors, *ctx.numbers))
        of_states = [next(found) for _ in range(3)]
        of_extras = [None if x is None else next(found) for x in ctx.saved_tensors[6:8]]
        return (*of_states, None, None, None, *of_extras, None, *(None for _ in ctx.numbers))

    _forward.register_autograd(_gradients, setup_context=_save)

    def _operator(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, boundaries: Boundaries, options: Options, scale: float
    ) -> torch.Tensor:
        seed = torch.randint(2**31, (), device=q.device) if options.dropout else None
        attended: torch.Tensor = _forward(
            q, k, v, boundaries.cu_seqlens, boundaries.parents, boundaries.until, options.sinks, options.alibi_slopes,
            seed, scale, options.causal, options.window, options.softcap, options.dropout,
        )  # fmt: skip
        return attended

    operator = _operator
