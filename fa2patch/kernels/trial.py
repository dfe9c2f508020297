"""The trial of a kernel before its first use: a row of small documents, compared with the reference, gradients too.

There are more builds of flash attention than anybody has tested: packages for another GPU, nightlies, windows one token
wider, derivatives that ignore an argument. Each would train without an error, so every kind of call is tried once.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from .._torch import is_no_verdict, outside_the_forward
from ..comparison import distance
from ..documents.boundaries import Boundaries, document_of
from .options import TABLE, Options
from .protocol import Asked, Kernel
from .reference import Reference

if TYPE_CHECKING:  # the rows are made in a trial, and every process pays for an import
    from .trial_rows import Call, Row

# The largest allowed error of a token in a head, relative to the length of the vector. It covers the dtype's rounding;
# for float32 that of TF32, which a user may have enabled. ``tests/kernels/test_planted_faults.py`` has the faults that
# it tells from rounding, and right kernels that round as those on a GPU do.
BOUNDS = {torch.float16: 1e-2, torch.bfloat16: 3e-2, torch.float32: 2e-2}

# Four times the distance of 1 and the next number, which for float32 is TF32's.
ROUNDING = {torch.float16: 2**-8, torch.bfloat16: 2**-5, torch.float32: 2**-8}

# A vector's length counts as no less than that of its neighbours up to so many tokens away: a sum of random vectors is
# small now and then, and its rounding is not.
NEAR = 4

# It begins what is said of a kernel that raises an error, where another one is said to be off by so much.
FAILS = "tried on this machine it fails"


def passes_trial(kernel: Kernel, asked: Asked, device: torch.device) -> tuple[bool, str]:
    if type(kernel) is Reference:
        return True, ""
    if kernel.BACKWARD:
        asked = asked._replace(gradients=True)
    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
    # Dropout is not tried, because every kernel drops other weights.
    features = tuple(name for name in asked.features if name != "dropout")
    return _tried(kernel, asked._replace(features=features), torch.device(device.type, index))


@cache
def _tried(kernel: Kernel, asked: Asked, device: torch.device) -> tuple[bool, str]:
    from .known_bad import known_bad  # a table that only a machine with other kernels needs

    reason = known_bad(kernel, asked)
    if reason:
        return False, reason
    able, reason = _verdict(kernel, asked, device)
    dim, value_dim = kernel.padded(asked.head_dim, asked.value_dim)
    # A build that fails with v's own head dimension gets another try with q's.
    if not able and dim != value_dim and kernel.MULTIPLE > 1:
        kernel.alike |= {(asked.head_dim, asked.value_dim)}
        able, reason = _verdict(kernel, asked, device)
    return able, reason


def _verdict(kernel: Kernel, asked: Asked, device: torch.device) -> tuple[bool, str]:
    try:
        with outside_the_forward(device), torch.autocast(device.type, enabled=False):
            return _compared(kernel, asked, device)
    except Exception as error:  # kernels raise errors of many types
        if is_no_verdict(error):
            raise  # the cache keeps no exceptions, so the next call tries again
        return False, f"{FAILS}: {type(error).__name__}: {error}".splitlines()[0]


def _compared(kernel: Kernel, asked: Asked, device: torch.device) -> tuple[bool, str]:
    from .trial_rows import Call, Row, calls, options_of, trial_row

    drawn = torch.Generator().manual_seed(0)
    row, options = trial_row(asked, drawn, device), options_of(asked, drawn, device)
    exact = torch.promote_types(asked.dtype, torch.float32)
    right = Row(tuple(x.to(exact) for x in row.states), row.direction.to(exact), row.documents)
    truth = _computed(Reference(), Call(right, options, (torch.empty(0), torch.empty(0))), exact, asked.gradients)
    bound, rounding = BOUNDS.get(asked.dtype, 1e-6), ROUNDING.get(asked.dtype, 1e-6)
    sizes = _sizes(truth, right, options, rounding / bound)
    names = ("outputs", "gradients of q", "gradients of k", "gradients of v")
    # What a kernel keeps from its first call must not reach the second, which has other memory.
    for number, call in enumerate(calls(row, options, exact)):
        again = " in a second call" if number else ""
        found = _computed(kernel, call, asked.dtype, asked.gradients)
        tokens, keys = call.order
        for name, one, other, size, order in zip(names, found, truth, sizes, (tokens, tokens, keys, keys)):
            error = _largest(one, other[order], size[order])
            if error > bound:
                reason = f"tried on this machine, its {name} are off by {error:.0%} in a token's head{again}"
                return False, f"{reason}, or no numbers"
        error = distance(found[4:], truth[4:])
        if error > 2 * bound:  # sums over all tokens
            reason = f"its gradients of what heads learn are off by {error:.0%}{again}, or no numbers"
            return False, f"tried on this machine, {reason}"
    return True, ""


def _computed(by: Kernel, call: Call, dtype: torch.dtype, gradients: bool) -> list[torch.Tensor]:
    row, leaves = call.row, [x.detach().requires_grad_() for x in call.row.states]
    options = call.options.with_heads(lambda by_head: by_head.detach().requires_grad_(), learned=True)
    learned = [getattr(options, option.name) for option in TABLE if option.learned]
    leaves += [value for value in learned if value is not None]
    options = options.with_heads(lambda by_head: by_head.view_as(by_head), learned=True)  # layers hand over views, too
    output = by(leaves[0], leaves[1], leaves[2], row.documents, options)
    return [output] if not gradients else [output, *torch.autograd.grad(output, leaves, row.direction.to(dtype))]


def _sizes(truth: list[torch.Tensor], row: Row, options: Options, rounded: float) -> list[torch.Tensor]:
    # Errors are relative to the length of each token's vector in a head, ``[tokens, heads]``. Late tokens are averages
    # of many values, so they are small beside the first ones: relative to the largest value, a kernel that is wrong for
    # all of them would be close to the reference.
    dtype, (q, k, _) = truth[0].dtype, row.states
    of_queries = _mean_of_near(row.documents, len(q), dtype)
    sources = row.documents.sources
    of_keys = of_queries if sources is None else _mean_of_near(sources, len(k), dtype)
    means = (of_queries, of_queries, of_keys, of_keys)
    squares = [mean @ x.detach().square().sum(-1) + 1e-30 for mean, x in zip(means, truth[:4])]
    if len(truth) > 1:
        # Where one key has nearly all the weight, gradients of q and k are small and their rounding is not.
        for at, rounding in enumerate(_of_rounding(truth[0], row, options), 1):
            squares[at] = squares[at] + rounded**2 * (means[at] @ rounding.square().sum(-1))
    return [square.sqrt() for square in squares]


def _mean_of_near(documents: Boundaries, tokens: int, dtype: torch.dtype) -> torch.Tensor:
    cu = documents.cu_seqlens
    document, token = document_of(cu, tokens), torch.arange(tokens, device=cu.device)
    near = (document[:, None] == document) & ((token[:, None] - token).abs() <= NEAR)
    return (near / near.sum(1, keepdim=True)).to(dtype)


def _of_rounding(output: torch.Tensor, row: Row, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    # The gradients of q and k of the output's rounding alone, if each number were off by all of itself, with random
    # signs. A backward subtracts the sum of gradient times output from the gradients of each query's weights
    # (FlashAttention-2, arXiv 2307.08691, algorithm 2, line 4). This sum is wrong where the output was rounded.
    q, k, _ = row.states
    size = (output.detach() * row.direction).square().sum(-1, keepdim=True).sqrt()
    sign = torch.randint(2, size.shape, generator=torch.Generator().manual_seed(1)).to(size) * 2 - 1
    values = k.detach().requires_grad_()
    seen = Reference()(q, k, values, row.documents, options)
    (of_keys,) = torch.autograd.grad(seen, values, size * sign * q)
    return options.scale * size * seen.detach(), options.scale * of_keys


def _largest(found: torch.Tensor, truth: torch.Tensor, size: torch.Tensor) -> float:
    if found.shape != truth.shape:
        return float("inf")
    lengths = (found.detach().to(truth.dtype) - truth.detach()).square().sum(-1).sqrt()
    largest = float((lengths / size).max())
    return largest if largest < float("inf") else float("inf")  # NaN is no number
