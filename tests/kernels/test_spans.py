"""Spans (a picture's tokens): every kernel that takes them equals the definition with a mask of all tokens."""

import random
from dataclasses import replace

import pytest
import stand_in_aten
import torch
from definition_cases import SPECIAL, attend_with, error_of_flex, errors_of, kernel_or_operator, options_of

from compat_matrix.check import stand_in
from compat_matrix.check.kernel_cases import DIM, documents, states
from fa2patch import kernels
from fa2patch.errors import KernelWrong, PackingNotIsolated
from fa2patch.kernels import Options
from fa2patch.kernels.protocol import require_within
from fa2patch.kernels.reference import Reference
from fa2patch.kernels.varlen import FlashAttn

LENGTHS = (6, 1, 9, 4)
SPANS = {
    "inside": ((2, 5),),
    "side by side": ((7, 10), (10, 14)),
    "at both ends": ((0, 2), (13, 16)),
    "across a boundary": ((13, 16), (16, 18)),
    "a whole document": ((16, 20), (6, 7)),
    "none": (),
}
NAMES = ("reference", "operator", "flash_attn", "torch_varlen", "efficient")


@pytest.fixture(autouse=True)
def aten_on_a_cpu():
    with stand_in_aten.installed():
        yield


class OnStandIn(FlashAttn):
    """flash-attn with the stand-in's entry point, on a CPU and in every precision."""

    DEVICES = DTYPES = None

    def found(self):
        return kernels.varlen.EntryPoint.of(stand_in)


def kernel_named(name):
    return OnStandIn() if name == "flash_attn" else kernels.named(name)


@pytest.mark.parametrize("value_dim", [DIM, 6], ids=["one head dim", "another value head dim"])
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("special", SPECIAL.values(), ids=SPECIAL)
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_equals_the_definition(name, spans, special, sinks, value_dim):
    options = options_of(special, sinks)
    attend = kernel_or_operator(name, options, kernel_named, spans=True)
    if attend is None:  # softcap, alibi and sinks
        assert name != "reference" and (special or sinks)
        return
    assert errors_of(attend, LENGTHS, options, value_dim, spans=spans) < 1e-12


@pytest.mark.parametrize("special", SPECIAL.values(), ids=SPECIAL)
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_flex_attention_equals_the_definition(spans, special):
    assert error_of_flex(LENGTHS, options_of(special, sinks=False), spans=spans) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2000))
def test_random_spans(seed):
    check_random_spans(seed)


@pytest.mark.parametrize("seed", range(40))
def test_some_random_spans(seed):
    check_random_spans(seed)


def check_random_spans(seed):
    """Random spans, with a random option, are computed right by the reference and by the kernels of two calls."""
    drawn = random.Random(seed)
    lengths = [drawn.randint(1, 12) for _ in range(drawn.randint(1, 5))]
    spans, at = [], 0
    for length in lengths:
        cuts = sorted({at, at + length, *(drawn.randint(at, at + length) for _ in range(drawn.randint(0, 4)))})
        spans += [span for span in zip(cuts, cuts[1:]) if drawn.random() < 0.5]
        at += length
    longest = max((stop - start for start, stop in spans), default=1)
    special = {"window": drawn.randint(longest, longest + 4)} if drawn.random() < 0.5 else {}
    options = options_of(special, sinks=False)
    for name in ("reference", "flash_attn", "torch_varlen"):
        assert errors_of(attend_with(kernel_named(name), options), lengths, options, spans=spans) < 1e-11, name


def test_a_kernel_that_computes_no_span_is_not_used():
    class Forgets(Reference):
        """A kernel that claims spans and does not look at them."""

        name = "forgets"
        MASKS = False

        def attend(self, q, k, v, boundaries, options, scale):
            if not options.causal:  # the second call
                return q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
            return super().attend(q, k, v, replace(boundaries, until=None, made={}), options, scale)

    q, k, v = states()
    cpu = torch.device("cpu")
    assert kernels.pick(Forgets(), kernels.asked_by(q, k, v, Options()), cpu).why == ""
    with pytest.raises(KernelWrong, match="outputs are off"):
        kernels.pick(Forgets(), kernels.asked_by(q, k, v, Options(), spans=True), cpu)


def test_a_span_longer_than_the_window_is_refused():
    boundaries = documents(LENGTHS, spans=SPANS["inside"])
    require_within(3, boundaries)
    with pytest.raises(PackingNotIsolated, match="longer than the sliding window of 2 tokens"):
        require_within(2, boundaries)


def test_nothing_crosses_a_boundary_between_two_spans():
    spans = SPANS["across a boundary"]
    q, k, v = states(LENGTHS)
    for name in ("reference", "flash_attn", "torch_varlen"):
        output = kernel_named(name)(q, k, v, documents(LENGTHS, spans=spans), Options())
        for x in torch.autograd.grad(output[7:16].sum(), (q, k, v)):
            assert not x[:7].any() and not x[16:].any() and x[7:16].abs().sum() > 0
