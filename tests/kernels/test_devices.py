"""Kernels of devices that nobody here has, each on a stand-in with the signature and rules of its documentation."""

import inspect
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from definition_cases import asks, errors_of, options_of
from torch.utils._python_dispatch import TorchDispatchMode

from compat_matrix.check import stand_in
from compat_matrix.check.kernel_cases import LENGTHS, documents, states
from fa2patch import kernels
from fa2patch.kernels import Options, ascend, devices, picks, trial, varlen
from fa2patch.kernels.ascend import Ascend
from fa2patch.kernels.reference import Reference
from fa2patch.kernels.varlen import Aiter

CPU = torch.device("cpu")


def put(monkeypatch, name, **attributes):
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, loader=None)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)


# --- Ascend ---------------------------------------------------------------------------------------------------

# The signature of the prototype in Ascend Extension for PyTorch 6.0, ``torch_npu.npu_fusion_attention``.
DOCUMENTED = (
    "query, key, value, head_num, input_layout, pse=None, padding_mask=None, atten_mask=None, scale=1.0, "
    "keep_prob=1.0, pre_tockens=2147483647, next_tockens=2147483647, inner_precise=0, prefix=None, "
    "actual_seq_qlen=None, actual_seq_kvlen=None, sparse_mode=0, gen_mask_parallel=True, sync=False"
)


def fusion_attention(query, key, value, head_num, input_layout, pse=None, padding_mask=None, atten_mask=None, scale=1.0,
                     keep_prob=1.0, pre_tockens=2147483647, next_tockens=2147483647, inner_precise=0, prefix=None,
                     actual_seq_qlen=None, actual_seq_kvlen=None, sparse_mode=0, gen_mask_parallel=True,
                     sync=False):  # fmt: skip
    # It computes what is documented for the layout TND, with every rule that is documented as an assertion.
    assert input_layout == "TND" and head_num == query.shape[1]
    assert query.shape[2] == key.shape[2] == value.shape[2] <= 512 and query.dtype == key.dtype == value.dtype
    for ends, tokens in ((actual_seq_qlen, query.shape[0]), (actual_seq_kvlen, key.shape[0])):
        assert all(type(end) is int for end in ends) and ends == sorted(ends) and ends[-1] == tokens
        assert len(ends) == len(actual_seq_qlen) <= 2048
    assert 0 < keep_prob <= 1 and (atten_mask is None) == (sparse_mode == 0)
    if atten_mask is not None:
        assert atten_mask.shape == (2048, 2048) and atten_mask.dtype == torch.bool
        assert torch.equal(atten_mask, torch.ones(2048, 2048, dtype=torch.bool).triu(1))
    outputs, first, first_key = [], 0, 0
    for end, key_end in zip(actual_seq_qlen, actual_seq_kvlen):
        q, k, v = query[first:end], key[first_key:key_end], value[first_key:key_end]
        assert not len(q) or len(k), "a document with queries has keys"
        k, v = (x.repeat_interleave(head_num // k.shape[1], 1) for x in (k, v))
        far = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        hidden = {
            0: torch.zeros_like(far, dtype=torch.bool),
            3: far < 0,
            4: (far > pre_tockens) | (-far > next_tockens),
        }[sparse_mode]
        logits = torch.einsum("ihd,jhd->hij", q, k) * scale
        outputs.append(torch.einsum("hij,jhd->ihd", logits.masked_fill(hidden, float("-inf")).softmax(-1), v))
        first, first_key = end, key_end
    return torch.cat(outputs), None, None, None, 0, 0, 0


@pytest.fixture
def npu(monkeypatch):
    # The arguments of the NPU's calls are given by name.
    calls = []

    def noted(*given, **more):
        calls.append(inspect.signature(fusion_attention).bind(*given, **more).arguments)
        return fusion_attention(*given, **more)

    put(monkeypatch, "torch_npu", npu_fusion_attention=noted)
    monkeypatch.setattr(torch, "npu", SimpleNamespace(is_available=lambda: True), raising=False)
    monkeypatch.setattr(Ascend, "DEVICES", None)
    monkeypatch.setattr(Ascend, "DTYPES", None)
    return calls


def test_the_stand_in_has_the_documented_signature():
    assert str(inspect.signature(fusion_attention)) == f"({DOCUMENTED})"


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize("more", [{}, {"parents": (-1, 0, 0, 2)}, {"spans": ((1, 3), (9, 12))}], ids=str)
def test_ascend_equals_the_definition(npu, more, causal, window, groups):
    if more and (window or not causal):
        pytest.skip("trees and spans are causal and have no window here")
    assert errors_of(Ascend(), Options(causal=causal, window=window, scale=0.3), groups=groups, **more) < 1e-11


@pytest.mark.parametrize(("dim", "value_dim"), [(12, 12), (12, 8), (192, 128)])
def test_ascend_is_handed_one_head_dimension(npu, dim, value_dim):
    assert errors_of(Ascend(), Options(), dim=dim, value_dim=value_dim) < 1e-11
    assert npu[0]["query"].shape[2] == npu[0]["value"].shape[2] == -(-dim // 16) * 16


def test_ascend_reads_nothing_with_lengths_and_once_without(npu, monkeypatch):
    reads = []
    monkeypatch.setattr(ascend, "read", lambda tensor: reads.append(1) or tensor.numpy())
    boundaries = documents(LENGTHS)
    boundaries._lengths = LENGTHS
    for _ in range(3):
        Ascend()(*states(), boundaries, Options())
    assert not reads and npu[0]["actual_seq_qlen"] == [1, 6, 9, 17]
    tree = documents(LENGTHS, parents=(-1, 0, 0, 2))
    for _ in range(3):
        Ascend()(*states(), tree, Options())
    assert len(reads) == 1 and npu[-1]["actual_seq_kvlen"] == [1, 7, 11, 23]


def test_more_documents_than_a_call_may_have_are_computed_in_several(npu, monkeypatch):
    monkeypatch.setattr(ascend, "MOST_DOCUMENTS", 2)
    lengths = (*LENGTHS, 4, 0, 0, 0)
    assert errors_of(Ascend(), Options(), lengths) < 1e-11
    assert [call["actual_seq_qlen"] for call in npu] == [[1, 6], [3, 11], [4, 4]]


def test_a_trial_believes_ascend_and_auto_takes_it(npu):
    assert trial.passes_trial(Ascend(), asks(key_heads=2, dtype=torch.float32), CPU) == (True, "")
    found = picks.pick("auto", asks(key_heads=2, dtype=torch.float32), CPU)
    assert found.kernel is kernels.named("ascend")


def test_what_is_missing_for_ascend_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    assert Ascend().available() == (False, "the package torch_npu is not installed")
    put(monkeypatch, "torch_npu")
    monkeypatch.setattr(torch, "npu", SimpleNamespace(is_available=lambda: False), raising=False)
    assert Ascend().available() == (False, "torch_npu finds no NPU")
    assert Ascend().supports(asks(["softcap"], device="npu")) == (False, "it has no softcap")
    assert Ascend().supports(asks(device="cuda")) == (False, "it needs a npu device, found cuda")


# --- ROCm -----------------------------------------------------------------------------------------------------


def of_aiter(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, min_seqlen_q=0, dropout_p=0.0,
             softmax_scale=None, logits_soft_cap=0.0, causal=False, window_size=(-1, -1, 0), bias=None,
             alibi_slopes=None, deterministic=False, return_lse=False, return_attn_probs=False, how_v3_bf16_cvt=1,
             block_table=None, out=None, cu_seqlens_q_padded=None, cu_seqlens_k_padded=None,
             sink_ptr=None):  # fmt: skip
    # ``flash_attn_varlen_func`` of aiter/ops/mha.py.
    assert len(window_size) in (2, 3)
    return stand_in.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size[:2], logits_soft_cap, alibi_slopes,
    )  # fmt: skip


@pytest.fixture
def aiter(monkeypatch):
    put(monkeypatch, "aiter", flash_attn_varlen_func=of_aiter)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(varlen, "entry_points", {})
    return Aiter()


@pytest.mark.parametrize("special", [{}, {"softcap": 2.0}, {"window": 4}, {"alibi_slopes": 0.3}], ids=str)
def test_aiter_equals_the_definition(aiter, special):
    assert aiter.available() == (True, "") and aiter.features() == aiter.FEATURES
    assert errors_of(aiter, options_of(special, sinks=False), groups=2) < 1e-11


def test_aiter_comes_before_torchs_own_on_rocm_alone(aiter, monkeypatch):
    names = [kernel.name for kernel in kernels.order()]
    assert names.index("flash_attn") < names.index("aiter") < names.index("torch_varlen")
    monkeypatch.setattr(torch.version, "hip", None)
    assert "aiter" not in {kernel.name for kernel in kernels.order()}
    assert Aiter().available() == (False, "this torch is not built for ROCm")


# --- devices without a kernel of their own --------------------------------------------------------------------


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_the_reference_computes_what_no_kernel_does_and_says_why(device):
    with pytest.warns(UserWarning, match="kernel 'reference', which is right and slow"):
        chosen = picks.Picks("auto")(None, asks(device=device), torch.device(device))
    assert type(chosen) is Reference


class Attentions(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "scaled_dot_product" in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("lengths", "calls"), [((70,) * 64, 2), ((9, 1, 7) * 20, 1), ((512, 500, 64, 60, 3), 5)])
def test_the_reference_calls_torchs_attention_for_each_group_of_near_lengths(lengths, calls):
    # MPS and XPU have it so today: so many calls a layer, whatever the number of documents.
    q, k, v = (x.detach() for x in states(lengths, torch.float32))
    with Attentions() as counted:
        Reference()(q, k, v, documents(lengths), Options())
    assert counted.count == calls


# --- the table ------------------------------------------------------------------------------------------------


def test_every_kernel_is_in_the_table_of_devices():
    rows = devices.device_rows()
    named = {name for row in rows for name in row["kernels"]}
    assert named == set(kernels.NAMES) - {"auto"}
    assert all(row["missing"] and row["kernels"][-1] == "reference" for row in rows)


def test_kernels_of_other_devices_are_known_by_name_and_listed():
    assert [kernels.named(name).name for name in picks.ELSEWHERE] == [*picks.ELSEWHERE]
    rows = {row["name"]: row["reason"] for row in kernels.kernel_rows()}
    assert rows["ascend"] == "the package torch_npu is not installed"
    assert rows["aiter"] == "this torch is not built for ROCm"


@pytest.mark.parametrize("name", picks.ELSEWHERE)
def test_a_graph_finds_the_kernel_without_an_import(name):
    # ``Picks.captured`` asks for a kernel by its name in each layer that is traced. Dynamo cannot trace an import.
    torch._dynamo.reset()
    kernel = picks.named(name)
    run = torch.compile(lambda x: x * len(picks.named(name).name), backend="eager", fullgraph=True)
    assert run(torch.ones(())) == len(kernel.name)
