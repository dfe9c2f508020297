"""The reference as a custom operator: its outputs, its hand-written backward, and torch's ``opcheck``."""

import pytest
import torch

from compat_matrix.check.kernel_cases import DIM, HEADS, LENGTHS, documents, largest_errors, states, with_gradients
from fa2patch.kernels import Options, reference
from fa2patch.kernels.reference import Reference

pytestmark = pytest.mark.skipif(reference.operator is None, reason=f"torch {torch.__version__} has no custom_op")


def extras(sinks, alibi, dtype=torch.float64):
    slopes = torch.tensor([0.5, 0.1, 1.0, 0.0], dtype=dtype).requires_grad_() if alibi else None
    logits = torch.tensor([0.5, -1.0, 2.0, 4.0], dtype=dtype).requires_grad_() if sinks else None
    return {"alibi_slopes": slopes, "sinks": logits}


@pytest.mark.parametrize("groups", [1, 2], ids=["MHA", "GQA"])
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("alibi", [False, True], ids=["no alibi", "alibi"])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_the_operator_equals_the_reference(causal, window, softcap, alibi, sinks, groups):
    q, k, v = states(groups=groups, value_dim=6)
    options = Options(causal=causal, window=window, softcap=softcap, **extras(sinks, alibi))
    given = [x for x in (q, k, v, options.sinks, options.alibi_slopes) if x is not None]
    found = with_gradients(lambda: reference.operator(q, k, v, documents(LENGTHS), options, DIM**-0.5), given)
    truth = with_gradients(lambda: Reference()(q, k, v, documents(LENGTHS), options), given)
    assert max(largest_errors(found, truth)) < 1e-12


@pytest.mark.parametrize("special", [{}, {"window": 3, "softcap": 2.0}], ids=str)
def test_the_backward_drops_what_the_forward_dropped(special):
    """The derivative along a direction equals a finite difference with the same seed."""
    q, k, v = states()
    options = Options(dropout=0.4, **special)

    def output(*given):
        torch.manual_seed(5)
        return reference.operator(*given, documents(LENGTHS), options, 0.3)

    moves = [torch.randn_like(x) for x in (q, k, v)]
    by_hand = torch.autograd.grad(output(q, k, v).square().sum(), [q, k, v])
    slope = sum((a * b).sum() for a, b in zip(by_hand, moves))
    step = 1e-6
    ahead, behind = (output(*(x + s * m for x, m in zip((q, k, v), moves))).square().sum() for s in (step, -step))
    assert abs((ahead - behind) / (2 * step) - slope) < 1e-4 * abs(slope)
    assert not torch.equal(output(q, k, v), reference.operator(q, k, v, documents(LENGTHS), Options(**special), 0.3))


def test_every_layer_drops_other_weights():
    """120 calls, as many as a large model has layers, drop different weights: no seed is drawn twice."""
    q, k, v = (x.detach() for x in states())
    drawn = [reference.operator(q, k, v, documents(LENGTHS), Options(dropout=0.4), 0.3) for _ in range(120)]
    assert len({tuple(output.flatten().tolist()) for output in drawn}) == len(drawn)


@pytest.mark.parametrize("spans", [None, [(2, 4)]], ids=["no spans", "spans"])
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
def test_torch_accepts_the_operator(sinks, spans):
    q, k, v = states((1, 3), groups=2, value_dim=6)
    given = extras(sinks, sinks)
    made = documents((1, 3), spans=spans)
    arguments = (
        q,
        k,
        v,
        made.cu_seqlens,
        None,
        made.until,
        given["sinks"],
        given["alibi_slopes"],
        None,
        0.3,
        True,
        2,
        2.0,
        0.0,
    )
    torch.library.opcheck(torch.ops.fa2patch.reference.default, arguments)


def test_heads_without_a_group_and_half_precision():
    q, k, v = states(dtype=torch.bfloat16, groups=HEADS)
    found = with_gradients(lambda: reference.operator(q, k, v, documents(LENGTHS), Options(), DIM**-0.5), [q, k, v])
    truth = with_gradients(lambda: Reference()(q, k, v, documents(LENGTHS), Options()), [q, k, v])
    assert [x.dtype for x in found] == [torch.bfloat16] * 4
    for error, tensor in zip(largest_errors(found, truth), truth):
        assert error <= 6e-2 * max(1.0, tensor.abs().max().item())
