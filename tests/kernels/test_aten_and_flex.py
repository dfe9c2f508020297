"""The kernels that come with torch: aten's operators, computed by a stand-in, and FlexAttention's real forward."""

import functools
import importlib
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import stand_in_aten
import torch
from definition_cases import asks, bias_of, error_of_flex, errors_of, sinks_of

from compat_matrix.check.kernel_cases import (
    DIM,
    HEADS,
    LENGTHS,
    WINDOWS,
    brute_force,
    documents,
    doubled,
    largest_errors,
    states,
    with_gradients,
)
from fa2patch.kernels import Options, aten
from fa2patch.kernels import flex as flex_module
from fa2patch.kernels.aten import Efficient, TorchVarlen
from fa2patch.kernels.flex import Flex, compute
from fa2patch.kernels.reference import Reference

of_both = pytest.mark.parametrize("kernel", [TorchVarlen(), Efficient()], ids=["torch_varlen", "efficient"])


@pytest.fixture
def calls():
    with stand_in_aten.installed() as made:
        yield made


@pytest.mark.parametrize("value_dim", [DIM, 6], ids=["one head dim", "another value head dim"])
@pytest.mark.parametrize("groups", [1, 4], ids=["MHA", "MQA"])
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_torch_varlen_equals_the_definition(calls, causal, window, sinks, groups, value_dim):
    options = Options(causal=causal, window=window, sinks=sinks_of(sinks), scale=0.7)
    assert errors_of(TorchVarlen(), options, groups=groups, value_dim=value_dim) < 1e-12
    reach = None if window is None else window - 1
    right = 0 if reach is not None and causal else reach
    assert calls[0] == {"cu": calls[0]["cu"], "max": max(LENGTHS), "left": reach, "right": right}


@pytest.mark.parametrize("groups", [1, 4], ids=["MHA", "MQA"])
@pytest.mark.parametrize("dims", [(DIM, DIM), (DIM, 6), (12, 12)], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_efficient_equals_the_definition(calls, causal, dims, groups):
    options = Options(causal=causal, scale=0.7)
    assert errors_of(Efficient(), options, groups=groups, dim=dims[0], value_dim=dims[1]) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_torch_varlen_with_sinks_in_half_precision(calls, dtype):
    given = [*states(dtype=dtype, groups=2), sinks_of(dtype=dtype)]
    options = Options(sinks=given[3])
    found = with_gradients(lambda: TorchVarlen()(*given[:3], documents(LENGTHS), options), given)
    assert [x.dtype for x in found] == [dtype] * 5
    exact = [doubled(x) for x in given]
    truth = with_gradients(lambda: brute_force(*exact[:3], LENGTHS, Options(sinks=exact[3])), exact)
    for error, tensor in zip(largest_errors(found, truth), truth):
        assert error <= 3e-2 * max(1.0, tensor.abs().max().item())


@pytest.mark.parametrize("parents", [None, (-1, -1, 1, 1, 3)], ids=["documents", "trees"])
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
def test_torch_varlen_takes_a_log_sum_exp_that_is_padded(sinks, parents):
    with stand_in_aten.installed(padded=True):
        assert errors_of(TorchVarlen(), Options(sinks=sinks_of(sinks)), (4, 6, 1, 3, 5), parents=parents) < 1e-12


def with_a_longer_longest(kernel):
    # The collator's ``max_documents`` and ``longest_document`` make such a ``max_seqlen``.
    return lambda q, k, v, boundaries, options: kernel(q, k, v, replace(boundaries, max_seqlen=4 * len(q)), options)


@pytest.mark.parametrize("lengths", [(*LENGTHS, 0, 0, 0), (0, *LENGTHS, 0)], ids=["at the end", "at both ends"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize("kernel", [TorchVarlen(), Efficient(), Reference()], ids=["torch_varlen", "efficient", "ours"])
def test_documents_without_tokens_change_nothing(calls, kernel, causal, lengths):
    assert errors_of(with_a_longer_longest(kernel), Options(causal=causal), lengths) < 1e-12
    if kernel.name != "efficient":  # it has no windows
        assert errors_of(with_a_longer_longest(kernel), Options(causal=causal, window=4), lengths) < 1e-12


@of_both
def test_boundaries_are_handed_over_as_they_are(calls, kernel):
    boundaries = documents(LENGTHS)
    kernel(*states(), boundaries, Options())
    assert calls[0]["cu"].data_ptr() == boundaries.cu_seqlens.data_ptr()
    assert boundaries._lengths is None, "the lengths were read from the device"


@of_both
def test_transposed_states_are_taken(calls, kernel):
    rows = [torch.randn(HEADS, DIM, sum(LENGTHS), dtype=torch.float64).permute(2, 0, 1) for _ in range(3)]
    output = kernel(*rows, documents(LENGTHS), Options())
    assert largest_errors([output], [brute_force(*rows, LENGTHS, Options())])[0] < 1e-12


def test_torch_without_windows_is_not_asked_for_them(monkeypatch):
    monkeypatch.setattr(aten, "arguments_of", lambda operator: frozenset({"cum_seq_q", "max_q", "scale"}))
    for feature, expected in (("window", (False, "it has no window")), ("sinks", (False, "it has no sinks"))):
        assert TorchVarlen().supports(asks([feature], device="cuda")) == expected
    assert TorchVarlen().supports(asks(["dropout"], device="cuda")) == (True, "")


def test_what_torch_and_the_gpu_lack_is_the_reason(monkeypatch):
    # On a stand-in for torch and its device: no operator, no device, an old one, a build without flash attention.
    arguments = frozenset()
    flash, efficient = aten._flash_runs.__wrapped__, aten._efficient_runs.__wrapped__
    monkeypatch.setattr(aten, "arguments_of", lambda operator: arguments)
    assert flash()[1].endswith("has no _flash_attention_forward with cu_seqlens")
    assert efficient()[1].endswith("has no _efficient_attention_forward with both longest lengths")
    arguments = frozenset({"cum_seq_q", "max_q", "cu_seqlens_q", "max_seqlen_k"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert flash() == efficient() == (False, "torch finds no CUDA device")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert flash() == (False, "Tesla T4 is older than Ampere") and efficient() == (True, "")
    monkeypatch.setattr(torch.version, "hip", "6.4")  # whose numbers mean something else
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False, raising=False)
    assert flash() == (False, "this torch was built without flash attention")
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    assert flash() == (True, "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
@pytest.mark.parametrize("kernel", [TorchVarlen(), Efficient(), Flex()], ids=lambda kernel: kernel.name)
def test_without_a_gpu_the_reason_is_given(kernel):
    able, reason = kernel.available()
    assert not able
    assert reason


# FlexAttention


@pytest.fixture(scope="module")
def flex():
    module = pytest.importorskip("torch.nn.attention.flex_attention")
    module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    return module.flex_attention, module.create_block_mask


@pytest.mark.parametrize("groups", [1, 2], ids=["MHA", "GQA"])
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("alibi", [False, True], ids=["no alibi", "alibi"])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_flex_equals_the_definition(flex, causal, window, softcap, alibi, sinks, groups):
    slopes = torch.tensor([0.5, 0.1, 1.0, 0.0]) if alibi else None
    options = Options(causal=causal, window=window, softcap=softcap, alibi_slopes=slopes, sinks=sinks_of(sinks))
    assert error_of_flex(options, groups=groups) < 1e-6


@pytest.mark.parametrize("groups", [1, 2], ids=["MHA", "GQA"])
@pytest.mark.parametrize("more", [{}, {"window": 4}, {"softcap": 2.0}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_flex_has_a_bias_of_each_document(flex, causal, more, groups):
    sinks = sinks_of(more.get("sinks", False))
    options = Options(**{**more, "causal": causal, "sinks": sinks, "bias": bias_of()})
    assert error_of_flex(options, groups=groups) < 1e-6


@pytest.mark.parametrize("lengths", [(*LENGTHS, 0, 0, 0), (0, *LENGTHS, 0)], ids=["at the end", "at both ends"])
def test_flex_leaves_documents_without_tokens_out(flex, lengths):
    assert error_of_flex(Options(window=4), lengths, dtype=torch.float32) < 1e-5


def test_flex_makes_one_block_mask_for_a_batch_and_kind_of_layer(flex):
    made = []

    def create(*given):
        made.append(given)
        return flex[1](*given)

    q, k, v = (x.detach() for x in states(dtype=torch.float32))
    boundaries = documents(LENGTHS)
    for options in (Options(), Options(), Options(window=3), Options(softcap=3.0), Options(window=3)):
        compute(flex[0], create, q, k, v, boundaries, options, 1.0)
    assert len(made) == 2
    compute(flex[0], create, q, k, v, documents(LENGTHS), Options(), 1.0)
    assert len(made) == 3


def test_flex_asks_for_the_log_sum_exp_as_this_torch_wants_it(flex):
    q, k, v = (x.detach() for x in states(dtype=torch.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        compute(*flex, q, k, v, documents(LENGTHS), Options(sinks=torch.zeros(HEADS)), 1.0)


@pytest.mark.parametrize("new", [False, True], ids=["return_lse", "return_aux"])
def test_flex_asks_for_the_log_sum_exp_by_the_argument_that_torch_has(monkeypatch, new):
    module = SimpleNamespace(**({"AuxRequest": lambda lse: {"lse": lse}} if new else {}))
    monkeypatch.setattr(flex_module, "importlib", SimpleNamespace(import_module=lambda name: module))
    asked = {}

    def flex_attention(q, k, v, **arguments):
        asked.update(arguments)
        lse = q.new_zeros(q.shape[:-1])
        return q, SimpleNamespace(lse=lse) if new else lse

    q, k, v = (x.detach() for x in states())
    options = Options(sinks=torch.zeros(HEADS))
    compute(flex_attention, lambda *given: None, q, k, v, documents(LENGTHS), options, 1.0)
    assert (asked.get("return_aux"), asked.get("return_lse")) == (({"lse": True}, None) if new else (None, True))


@pytest.mark.slow
def test_flex_compiled_equals_the_definition():
    importlib.import_module("torch.nn.attention.flex_attention")
    for lengths in (LENGTHS, (3, 9, 20), (130, 7)):
        q, k, v = (x.detach() for x in states(lengths, dtype=torch.float32, dim=16, value_dim=16, groups=2))
        options = Options(window=5, softcap=2.0)
        found = Flex().attend(q, k, v, documents(lengths), options, 0.25)
        truth = brute_force(*(x.double() for x in (q, k, v)), lengths, options)
        assert largest_errors([found], [truth])[0] < 1e-5


@pytest.mark.slow
def test_flex_is_compiled_for_more_kinds_of_calls_than_dynamo_compiles_one_function_for(monkeypatch, flex, caplog):
    # Beyond dynamo's limit, FlexAttention would run uncompiled: slow, and with a score for every two tokens.
    limit = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
    monkeypatch.setattr(flex_module.torch, "compile", functools.partial(torch.compile, backend="eager"))
    flex_module._compiled.cache_clear()
    with torch._dynamo.config.patch(**{limit: 2}):
        for causal, softcap in ((True, None), (False, None), (True, 2.0)):
            q, k, v = (x.detach() for x in states(dtype=torch.float32))
            options = Options(causal=causal, softcap=softcap)
            found = Flex().attend(q, k, v, documents(LENGTHS), options, DIM**-0.5)
            truth = brute_force(*(x.double() for x in (q, k, v)), LENGTHS, options)
            assert largest_errors([found], [truth])[0] < 1e-5
    flex_module._compiled.cache_clear()
    assert [record.message for record in caplog.records if "limit" in record.message] == []
