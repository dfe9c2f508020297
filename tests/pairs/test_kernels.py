"""Kernels with keys of other rows: right ones pass the trial, and planted faults do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import stand_in_aten
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from fa2patch.documents.boundaries import Boundaries
from fa2patch.documents.tensors import ends_of
from fa2patch.kernels import Kernel, Options, packed_attention
from fa2patch.kernels.aten import Efficient, TorchVarlen
from fa2patch.kernels.flex import compute
from fa2patch.kernels.picks import every_kernel
from fa2patch.kernels.protocol import Asked
from fa2patch.kernels.trial import _compared

TARGETS, SOURCES = (5, 3, 7, 2, 40, 1), (6, 2, 9, 1, 33, 50)
CPU = torch.device("cpu")


def pairs():
    return Boundaries(
        ends_of(TARGETS, CPU), max(TARGETS), _lengths=TARGETS, sources=Boundaries(ends_of(SOURCES, CPU), max(SOURCES))
    )


def states(dtype=torch.float64):
    drawn = torch.Generator().manual_seed(0)
    sizes = (sum(TARGETS), 4), (sum(SOURCES), 2), (sum(SOURCES), 2)
    return [torch.randn(1, *size, 8, generator=drawn, dtype=dtype).requires_grad_() for size in sizes]


def pair_by_pair(q, k, v, bias=None):
    outputs = []
    for one, *of_source in zip(q[0].split(TARGETS), k[0].split(SOURCES), v[0].split(SOURCES)):
        keys, values = (each.repeat_interleave(2, 1).transpose(0, 1) for each in of_source)
        own = None if bias is None else bias[:, : len(one), : keys.shape[1]]
        outputs.append(
            torch.nn.functional.scaled_dot_product_attention(one.transpose(0, 1), keys, values, attn_mask=own)
        )
    return torch.cat([output.transpose(0, 1) for output in outputs])[None]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_the_reference_computes_each_pair(biased, compiled):
    bias = torch.randn(4, 50, 50, dtype=torch.float64).requires_grad_() if biased else None
    given = [*states(), *([bias] if biased else [])]
    attention = torch.compile(packed_attention, backend="aot_eager") if compiled else packed_attention
    found = attention(*given[:3], pairs(), Options(causal=False, bias=bias), "reference")
    expected = pair_by_pair(*given)
    torch.testing.assert_close(found, expected)
    direction = torch.randn_like(expected)
    for one, other in zip(*(torch.autograd.grad(output, given, direction) for output in (found, expected))):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("causal", [False, True])
def test_a_bias_is_that_of_each_document(causal):
    q, k, v = (torch.randn(1, sum(TARGETS), 4, 8, dtype=torch.float64) for _ in range(3))
    bias = torch.randn(4, 40, 40, dtype=torch.float64)
    found = packed_attention(q, k, v, replace(pairs(), sources=None), Options(causal=causal, bias=bias), "reference")
    outputs = []
    for one in zip(*(each[0].split(TARGETS) for each in (q, k, v))):
        length = len(one[0])
        mask = bias[:, :length, :length]
        mask = mask.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf) if causal else mask
        heads = [each.transpose(0, 1) for each in one]
        outputs.append(torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(0, 1))
    torch.testing.assert_close(found, torch.cat(outputs)[None])


def test_flex_attention_has_two_tables_of_documents():
    q, k, v = (each.detach()[0].float() for each in states())
    found = compute(flex_attention, create_block_mask, q, k, v, pairs(), Options(causal=False), 8**-0.5)
    torch.testing.assert_close(found[None], pair_by_pair(q[None], k[None], v[None]), rtol=1e-5, atol=1e-5)


ASKED = Asked("cpu", torch.float32, 4, 2, 32, 32, False, ("pairs",))


@pytest.mark.parametrize("kernel", [TorchVarlen(), Efficient()], ids=lambda kernel: kernel.name)
def test_torchs_operators_pass_the_trial(kernel):
    with stand_in_aten.installed():
        assert _compared(kernel, ASKED, CPU) == (True, "")


class Loop(Kernel):
    """A kernel that reads the ends of queries and of keys, as flash attention does."""

    name = "loop"
    DEVICES = DTYPES = MAX_HEAD_DIM = None
    FEATURES = frozenset({"pairs"})
    fault = ""

    def available(self):
        return True, ""

    def attend(self, q, k, v, boundaries, options, scale):
        keys = boundaries.keys(len(q))
        ends, of_keys = boundaries.cu_seqlens.tolist(), keys.cu_seqlens.tolist()
        if self.fault == "the queries' ends":
            of_keys = [min(end, len(k)) for end in ends]
        if self.fault == "a key more":
            of_keys = [*of_keys[:-1], len(k)]
            of_keys[4] += 1
        places = [slice(start, max(stop, start + 1)) for start, stop in zip(of_keys, of_keys[1:])]
        if self.fault == "the source before":
            places = [places[-1], *places[:-1]]
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        outputs = []
        for at in range(len(ends) - 1):
            one = [each.transpose(0, 1) for each in (q[ends[at] : ends[at + 1]], k[places[at]], v[places[at]])]
            causal = self.fault == "causal"
            outputs.append(torch.nn.functional.scaled_dot_product_attention(*one, scale=scale, is_causal=causal))
        return torch.cat(outputs, 1).transpose(0, 1)


@pytest.mark.parametrize("fault", ["", "the queries' ends", "a key more", "the source before", "causal"])
def test_planted_faults_fail_the_trial(fault):
    kernel = Loop()
    kernel.fault = fault
    able, reason = _compared(kernel, ASKED, CPU)
    assert able is not bool(fault), reason


def test_every_kernel_with_keys_of_other_lengths_says_so():
    has = {kernel.name for kernel in every_kernel() if "pairs" in kernel.FEATURES}
    assert has >= {"flash_attn", "flash_attn_3", "flash_attn_4", "torch_varlen", "efficient", "flex", "reference"}
    assert {kernel.name for kernel in every_kernel() if "bias" in kernel.FEATURES} == {"reference"}
