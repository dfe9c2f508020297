"""Kernels with keys of other rows: right ones pass the trial, and planted faults do not."""

from __future__ import annotations

import functools
import importlib
from dataclasses import replace

import pytest
import stand_in_aten
import torch
from pairs import alone, built
from pairs import pairs as of_family

import fa2patch
from compat_matrix.check.compare import assert_same_gradients
from fa2patch.documents.boundaries import Boundaries, document_of
from fa2patch.documents.tensors import ends_of
from fa2patch.kernels import Kernel, Options, packed_attention
from fa2patch.kernels import flex as flex_module
from fa2patch.kernels.aten import Efficient, TorchVarlen
from fa2patch.kernels.flex import Flex
from fa2patch.kernels.picks import every_kernel
from fa2patch.kernels.protocol import Asked
from fa2patch.kernels.reference import Reference
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


@pytest.fixture
def flex(monkeypatch):
    # Its kernels have a backward on GPUs only, and its definition, which runs here, has one that torch does not offer.
    monkeypatch.setattr(importlib.import_module("torch.nn.attention.flex_attention"), "_validate_device", lambda *_: 0)
    monkeypatch.setattr(Flex, "DEVICES", None)
    monkeypatch.setattr(Flex, "available", lambda kernel: (True, ""))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    flex_module._compiled.cache_clear()
    yield Flex()
    flex_module._compiled.cache_clear()


@pytest.mark.parametrize("biased", [False, True])
def test_flex_attention_has_two_tables_of_documents(flex, biased):
    bias = torch.randn(4, 50, 50, dtype=torch.float64).requires_grad_() if biased else None
    given = [*states(), *([bias] if biased else [])]
    found = packed_attention(*given[:3], pairs(), Options(causal=False, bias=bias), flex)
    expected = pair_by_pair(*given)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    direction = torch.randn_like(expected)
    for one, other in zip(*(torch.autograd.grad(output, given, direction) for output in (found, expected))):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


ASKED = Asked("cpu", torch.float32, 4, 2, 32, 32, False, ("pairs",))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "features, dtype",
    [
        (("pairs",), torch.float32),
        (("bias", "pairs"), torch.bfloat16),
        (("window", "bias"), torch.bfloat16),
        (("bias",), torch.float32),
    ],
    ids=str,
)
def test_flex_attention_passes_the_trial(flex, features, dtype, causal):
    assert _compared(flex, ASKED._replace(features=features, dtype=dtype, causal=causal), CPU) == (True, "")


def test_a_window_counts_from_the_last_key(flex):
    asked = ASKED._replace(features=("window", "pairs"), dtype=torch.bfloat16, causal=True)
    assert _compared(flex, asked, CPU) == (True, "")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "umt5"])
def test_flex_attention_computes_a_model_with_a_bias(flex, family):
    model, batch = built(family), of_family(family)
    loss, logits, gradients = alone(model, batch)
    patch = fa2patch.apply(model, prove=False, kernel=flex)
    model.zero_grad()
    output = model(**batch.packed())
    output.loss.backward()
    assert {layer.kernel for layer in fa2patch.status(model.decoder).layers} == {"flex"}, patch
    torch.testing.assert_close(output.logits[0], logits, rtol=1e-4, atol=1e-4)
    tables = {name: found for name, found in gradients.items() if "relative_attention_bias" in name}
    assert tables and output.loss.item() == pytest.approx(loss, rel=1e-5)
    found = {name: weight.grad for name, weight in model.named_parameters() if name in tables}
    assert_same_gradients(found, tables, 1e-4, 0.01)


def test_flex_attention_has_no_bias_in_a_torch_that_does_not_differentiate_it(flex, monkeypatch):
    asked = ASKED._replace(features=("bias",), causal=True)
    assert flex.supports(asked) == (True, "")
    ordered = asked._replace(features=("bias", "deterministic"))
    assert flex.supports(ordered) == (False, "its gradients of a bias are added up in any order")
    monkeypatch.setattr(flex_module, "_differentiates_captured", lambda: False)
    assert flex.supports(asked) == (False, "it has no bias")


def _over_the_row(boundaries, bias, q, k, v, options):
    # one document's bias for the whole row: another place of a token than its own
    tokens = torch.arange(len(q))
    return _with_scores(boundaries, bias[:, tokens[:, None] % bias.shape[1], tokens % bias.shape[1]], q, k, v, options)


def _one_off(boundaries, bias, q, k, v, options):
    return _right(boundaries, bias.roll(1, 2), q, k, v, options)


def _of_another_head(boundaries, bias, q, k, v, options):
    return _right(boundaries, bias.roll(1, 0), q, k, v, options)


def _transposed(boundaries, bias, q, k, v, options):
    return _right(boundaries, bias.transpose(1, 2), q, k, v, options)


def _without_its_gradient(boundaries, bias, q, k, v, options):
    return _right(boundaries, bias.detach() + 0 * bias, q, k, v, options)


def _without_the_gradient_of_a_view(boundaries, bias, q, k, v, options):
    return _right(boundaries, bias.detach() + 0 * bias if bias._is_view() else bias, q, k, v, options)


def _with_the_last_documents_gradient(boundaries, bias, q, k, v, options):
    first = boundaries.positions_of((1, len(q)))[0]
    own = bias[:, first[:, None], first]
    last = torch.arange(len(q)) >= boundaries.cu_seqlens[-2]
    return _with_scores(boundaries, torch.where(last[:, None], own, own.detach()), q, k, v, options)


def _right(boundaries, bias, q, k, v, options):
    place = boundaries.positions_of((1, len(q)))[0]
    return _with_scores(boundaries, bias[:, place[:, None], place], q, k, v, options)


def _with_scores(boundaries, added, q, k, v, options):
    keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, keys) * options.scale + added
    document = document_of(boundaries.cu_seqlens, len(q))
    weights = scores.masked_fill(document[:, None] != document, float("-inf")).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weights, values)


class Biased(Reference):
    name = "biased"

    def __init__(self, computed):
        self.computed = computed

    def attend(self, q, k, v, boundaries, options, scale):
        return self.computed(boundaries, options.bias, q, k, v, options)


BIAS_FAULTS = (
    _over_the_row, _one_off, _of_another_head, _transposed, _without_its_gradient, _without_the_gradient_of_a_view,
    _with_the_last_documents_gradient,
)  # fmt: skip


@pytest.mark.parametrize("fault", [_right, *BIAS_FAULTS], ids=lambda fault: fault.__name__)
def test_a_planted_fault_in_a_bias_fails_the_trial(fault):
    able, reason = _compared(Biased(fault), ASKED._replace(features=("bias",)), CPU)
    assert able is (fault is _right), reason


def test_the_heads_of_a_row_that_is_computed_in_parts_keep_their_bias(monkeypatch):
    q, k, v = (torch.randn(1, sum(TARGETS), heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    options, boundaries = Options(bias=torch.randn(4, 40, 40, dtype=torch.float64)), replace(pairs(), sources=None)
    whole = packed_attention(q, k, v, boundaries, options, "reference")
    kernel = Reference()
    monkeypatch.setattr(Reference, "LARGEST", (sum(TARGETS) + 128 * 7) * 64 * 2)
    torch.testing.assert_close(packed_attention(q, k, v, boundaries, options, kernel), whole)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", [TorchVarlen(), Efficient(), Reference()], ids=lambda kernel: kernel.name)
def test_torchs_operators_pass_the_trial(kernel, causal):
    with stand_in_aten.installed():
        assert _compared(kernel, ASKED._replace(causal=causal), CPU) == (True, "")


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
            queries, seen = one[0].shape[1], one[1].shape[1]
            asked = {"is_causal": self.fault == "causal"}  # from the first key
            if options.causal and self.fault != "causal":  # from the last one
                asked = {"attn_mask": torch.ones(queries, seen, dtype=torch.bool).tril(seen - queries)}
            outputs.append(torch.nn.functional.scaled_dot_product_attention(*one, scale=scale, **asked))
        return torch.cat(outputs, 1).transpose(0, 1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("fault", ["", "the queries' ends", "a key more", "the source before", "causal"])
def test_planted_faults_fail_the_trial(fault, causal):
    kernel = Loop()
    kernel.fault = fault
    able, reason = _compared(kernel, ASKED._replace(causal=causal), CPU)
    assert able is not bool(fault), reason


def test_every_kernel_with_keys_of_other_lengths_says_so():
    has = {kernel.name for kernel in every_kernel() if "pairs" in kernel.FEATURES}
    assert has >= {"flash_attn", "flash_attn_3", "flash_attn_4", "torch_varlen", "efficient", "flex", "reference"}
    assert {kernel.name for kernel in every_kernel() if "bias" in kernel.FEATURES} == {"flex", "reference"}
