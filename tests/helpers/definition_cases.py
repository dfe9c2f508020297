"""Kernels on batches that are more than documents (trees of segments, spans), beside the definition of attention."""

import pytest
import torch

from compat_matrix.check.kernel_cases import DIM, brute_force, documents, largest_errors, states, with_gradients
from fa2patch import kernels
from fa2patch.kernels import Options, reference
from fa2patch.kernels.flex import compute

SPECIAL = {"plain": {}, "window": {"window": 4}, "softcap": {"softcap": 2.0}, "alibi": {"alibi_slopes": 0.3}}


def options_of(special, sinks):
    """Return options with these special ones, and with sinks that require gradients if wanted."""
    given = dict(special)
    if "alibi_slopes" in given:
        # flash-attn takes them in float32, in which powers of two are exact
        given["alibi_slopes"] = torch.tensor([0.5, 0.125, 1.0, 0.0], dtype=torch.float64)
    logits = torch.tensor([0.5, -1.0, 2.0, 4.0], dtype=torch.float64).requires_grad_() if sinks else None
    return Options(scale=0.7 * DIM**-0.5, sinks=logits, **given)


def errors_of(attend, lengths, options, value_dim=DIM, groups=2, **more):
    """Return the largest error of the outputs and gradients. ``more`` has ``parents`` or ``spans``."""
    q, k, v = states(lengths, groups=groups, value_dim=value_dim)
    given = [x for x in (q, k, v, options.sinks) if x is not None]
    found = with_gradients(lambda: attend(q, k, v, documents(lengths, **more)), given)
    truth = with_gradients(lambda: brute_force(q, k, v, lengths, options, **more), given)
    return max(largest_errors(found, truth))


def attend_with(kernel, options):
    """Return a function of ``q, k, v, boundaries``."""

    def attend(q, k, v, boundaries):
        return kernel(q, k, v, boundaries, options)

    return attend


def kernel_or_operator(name, options, kernel_named, **asked):
    """Return a function of ``q, k, v, boundaries`` for a kernel, or for the reference as an operator of torch.

    It is None if the kernel does not support what is asked with these options. What a kernel lacks is in its table.
    """
    if name == "operator":
        if reference.operator is None:
            pytest.skip(f"torch {torch.__version__} has no custom_op")
        return lambda q, k, v, boundaries: reference.operator(q, k, v, boundaries, options, options.scale)
    kernel = kernel_named(name)
    able, _ = kernel.supports(kernels.asked_by(*states(), options, **asked))
    return attend_with(kernel, options) if able else None


def error_of_flex(lengths, options, **more):
    """Return the error of FlexAttention's real forward; its backward runs on GPUs only."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    q, k, v = (x.detach() for x in states(lengths, groups=2))
    boundaries = documents(lengths, **more)
    found = compute(flex.flex_attention, flex.create_block_mask, q, k, v, boundaries, options, options.scale)
    return max(largest_errors([found], [brute_force(q, k, v, lengths, options, **more)]))
