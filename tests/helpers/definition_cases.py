"""Kernels beside the definition of attention, on documents, trees and spans, and what layers ask of them."""

from unittest import mock

import pytest
import torch

from compat_matrix.check.kernel_cases import (
    DIM,
    HEADS,
    LENGTHS,
    brute_force,
    documents,
    doubled,
    largest_errors,
    states,
    with_gradients,
)
from fa2patch import kernels
from fa2patch._torch import HAS_OPERATORS
from fa2patch.kernels import Options, reference
from fa2patch.kernels.flex import compute

SPECIAL = {
    "plain": {},
    "window": {"window": 4}, "softcap": {"softcap": 2.0}, "alibi": {"alibi_slopes": 0.3}, "bias": {"bias": 1},
}  # fmt: skip
SINKS = (0.5, -1.0, 2.0, 4.0)


def asks(features=(), device="cpu", dtype=torch.bfloat16, dim=64, value_dim=None, key_heads=HEADS, causal=True):
    return kernels.Asked(device, dtype, HEADS, key_heads, dim, value_dim or dim, causal, tuple(features))


def sinks_of(wanted=True, dtype=torch.float64):
    return torch.tensor(SINKS, dtype=dtype).requires_grad_() if wanted else None


def slopes_of(wanted=True, dtype=torch.float64):
    return torch.tensor([0.5, 0.1, 1.0, 0.0], dtype=dtype).requires_grad_() if wanted else None


def bias_of(wanted=True, longest=30):
    drawn = torch.Generator().manual_seed(5)
    return (
        torch.randn(HEADS, longest, longest, generator=drawn, dtype=torch.float64).requires_grad_() if wanted else None
    )


def options_of(special, sinks):
    given = dict(special)
    if "bias" in given:
        given["bias"] = bias_of()
    if "alibi_slopes" in given:
        # flash-attn takes them in float32, in which powers of two are exact
        given["alibi_slopes"] = torch.tensor([0.5, 0.125, 1.0, 0.0], dtype=torch.float64)
    return Options(scale=0.7 * DIM**-0.5, sinks=sinks_of(sinks), **given)


def errors_of(attend, options, lengths=LENGTHS, *, groups=2, dim=DIM, value_dim=DIM, **more):
    # ``attend`` is a kernel, or a function of q, k, v, boundaries and options. ``more`` may have ``parents`` or
    # ``spans``.
    q, k, v = states(lengths, groups=groups, dim=dim, value_dim=value_dim)
    given = [x for x in (q, k, v, options.sinks, options.bias) if x is not None]
    found = with_gradients(lambda: attend(q, k, v, documents(lengths, **more), options), given)
    assert found[0].is_contiguous()
    truth = with_gradients(lambda: brute_force(q, k, v, lengths, options, **more), given)
    return max(largest_errors(found, truth))


def operator(q, k, v, boundaries, options):
    scale = q.shape[-1] ** -0.5 if options.scale is None else options.scale
    return reference.operator(q, k, v, boundaries, options, scale)


def kernel_or_operator(name, options, kernel_named, **asked):
    # "operator" is the reference as an operator of torch. The result is None if the kernel does not support what is
    # asked; what a kernel lacks is in its table.
    if name == "operator":
        if not HAS_OPERATORS:
            pytest.skip(f"torch {torch.__version__} has no custom_op")
        return operator
    kernel = kernel_named(name)
    able, _ = kernel.supports(kernels.asked_by(*states(), options, **asked))
    return kernel if able else None


def error_of_flex(options, lengths=LENGTHS, *, dtype=torch.float64, groups=2, **more):
    # Its kernels have a backward on GPUs only, and its definition, which runs here, has one that torch does not offer.
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    given = [x for x in (*states(lengths, dtype=dtype, groups=groups), options.sinks, options.bias) if x is not None]
    boundaries, scale = documents(lengths, **more), DIM**-0.5 if options.scale is None else options.scale

    def attend():
        return compute(flex.flex_attention, flex.create_block_mask, *given[:3], boundaries, options, scale)

    traced = options.bias is not None  # else what a score refers to has no gradient
    with (
        mock.patch.object(flex, "_validate_device", lambda *states: None),
        mock.patch.object(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", not traced),
    ):
        torch.compiler.reset()
        found = with_gradients(attend, given)
    assert found[0].is_contiguous()
    exact = [doubled(x) for x in given[:3]]
    truth = with_gradients(lambda: brute_force(*exact, lengths, options, **more), [*exact, *given[3:]])
    return max(largest_errors(found, truth))
