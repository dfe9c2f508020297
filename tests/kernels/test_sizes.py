"""Rows that are too large for one call of a kernel are computed some heads at a time; shapes at a million tokens."""

import math

import fake_kernels
import pytest
import stand_in_aten
import torch
from definition_cases import errors_of, options_of
from torch._subclasses.fake_tensor import FakeTensorMode

from compat_matrix.check import stand_in
from compat_matrix.check.kernel_cases import LENGTHS, documents, states
from fa2patch.documents.boundaries import Boundaries
from fa2patch.errors import KernelUnavailable
from fa2patch.kernels import Options, packed_attention
from fa2patch.kernels.aten import TorchVarlen
from fa2patch.kernels.protocol import IN_32_BITS
from fa2patch.kernels.varlen import EntryPoint, FlashAttn

# What one head of a small row counts for: head dimensions are rounded up to 64.
PER_HEAD = (sum(LENGTHS) + 128 * (len(LENGTHS) + 1)) * 64


class Counted(FlashAttn):
    # FlashAttention 2's path with the stand-in. It notes the heads of its calls.

    def __init__(self, heads):
        self.LARGEST, self.calls = heads * PER_HEAD, []

    def found(self):
        return EntryPoint.of(stand_in)

    def attend(self, q, k, v, *more):
        assert all(x.is_contiguous() for x in (q, k, v)) or len(self.calls) == 0 and q.shape[1] == 4
        self.calls.append((q.shape[1], k.shape[1]))
        return super().attend(q, k, v, *more)


@pytest.mark.parametrize(
    ("heads", "groups", "calls"),
    [
        (4, 1, [(4, 4)]),
        (3, 1, [(3, 3), (1, 1)]),
        (1, 1, [(1, 1)] * 4),
        (3, 2, [(2, 1)] * 2),
        (1, 2, [(1, 1)] * 4),
        (3, 4, [(2, 1)] * 2),
        (1, 4, [(1, 1)] * 4),
    ],
)
@pytest.mark.parametrize("special", [{}, {"softcap": 2.0}, {"window": 4}, {"alibi_slopes": 0.3}], ids=str)
def test_a_large_row_is_computed_some_heads_at_a_time(heads, groups, calls, special):
    kernel = Counted(heads)
    assert errors_of(kernel, options_of(special, sinks=False), groups=groups) < 1e-11
    assert kernel.calls == calls


@pytest.mark.parametrize("more", [{}, {"parents": (-1, 0, 0, 2)}, {"spans": ((1, 3), (9, 12))}], ids=str)
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_sinks_trees_and_spans_of_a_large_row(groups, sinks, more):
    calls = []
    with stand_in_aten.installed():
        kernel = TorchVarlen()
        kernel.LARGEST, attend = 2 * PER_HEAD, kernel.attend
        kernel.attend = lambda q, *rest: calls.append(q.shape[1]) or attend(q, *rest)
        assert errors_of(kernel, options_of({}, sinks), groups=groups, **more) < 1e-10
    assert set(calls) == {2}


def test_a_row_of_which_no_head_can_be_computed_is_refused():
    q, k, v = states()
    kernel = Counted(1)
    kernel.LARGEST = PER_HEAD - 1
    with pytest.raises(KernelUnavailable, match=r"expected \(tokens \+ 128 \* documents\) \* head dim up to 42,047,"):
        kernel(q, k, v, documents(LENGTHS), Options())


def test_the_documents_of_a_graph_that_counts_them_later_are_estimated():
    q, k, v = states()
    boundaries = documents(LENGTHS)
    boundaries.uncounted = True
    kernel = Counted(1)
    kernel.LARGEST = (17 + 128) * 64 * 4
    kernel(q, k, v, boundaries, Options())
    assert kernel.calls == [(4, 4)]


# A million tokens, of which only shapes are computed

TOKENS = 2**20
FAMILIES = {
    # query heads, key heads, head dimension, value dimension, window, softcap, sinks
    "Llama 2 7B": (32, 32, 128, 128, None, None, False),
    "Llama 3 70B": (64, 8, 128, 128, None, None, False),
    "Qwen2.5 7B": (28, 4, 128, 128, None, None, False),
    "Mistral 7B": (32, 8, 128, 128, 4096, None, False),
    "Gemma 2 9B": (16, 8, 256, 256, 4096, 50.0, False),
    "GPT-OSS 20B": (64, 8, 64, 64, 128, None, True),
    "DeepSeek-V3": (128, 128, 192, 128, None, None, False),
    "Phi-2": (32, 32, 80, 80, None, None, False),
    "Falcon 7B": (71, 1, 64, 64, None, None, False),
    "ModernBERT": (12, 12, 64, 64, 64, None, False),
}
KERNELS = fake_kernels.kernels()


def shapes(kernel, family, counts):
    # A row of a million tokens runs forward and backward on fake tensors.
    heads, key_heads, dim, value_dim, window, softcap, sinks = FAMILIES[family]
    calls, attend = [], kernel.attend

    def watched(q, k, v, boundaries, *more):
        calls.append((q, k, v, boundaries, attend(q, k, v, boundaries, *more)))
        return calls[-1][-1]

    with FakeTensorMode(allow_non_fake_inputs=True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "attend", watched, raising=False)
        made = {"dtype": torch.bfloat16, "requires_grad": True}
        q, k = torch.empty(1, TOKENS, heads, dim, **made), torch.empty(1, TOKENS, key_heads, dim, **made)
        v = torch.empty(1, TOKENS, key_heads, value_dim, **made)
        leaves = [q, k, v] + ([torch.empty(heads, **made)] if sinks else [])
        options = Options(window=window, softcap=softcap, sinks=leaves[3] if sinks else None)
        boundaries = Boundaries(torch.empty(counts + 1, dtype=torch.int32), TOKENS // counts, None)
        output = packed_attention(q, k, v, boundaries, options, kernel)
        assert output.shape == (1, TOKENS, heads, value_dim) and output.is_contiguous()
        assert output.dtype == torch.bfloat16
        if kernel.name == "efficient":  # the fake kernel of its backward fails: it gets the scale twice (torch 2.13)
            return calls
        gradients = torch.autograd.grad(output, leaves, torch.empty_like(output))
        assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, x.dtype) for x in leaves]
    return calls


@pytest.mark.parametrize("counts", [1, 1000, 32768])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", KERNELS)
def test_a_row_of_a_million_tokens(name, family, counts):
    kernel = KERNELS[name][0]
    heads, key_heads, dim, value_dim, window, softcap, sinks = FAMILIES[family]
    needed = {"window": window, "softcap": softcap, "sinks": sinks}
    if not {feature for feature, there in needed.items() if there} <= kernel.FEATURES:
        pytest.skip(f"{name} does not compute {family}")
    calls = shapes(kernel, family, counts)
    for q, k, v, boundaries, output in calls:
        assert boundaries.cu_seqlens.dtype == torch.int32
        assert q.shape[1] % k.shape[1] == 0 and k.shape[:2] == v.shape[:2]
        assert output.shape == (*q.shape[:2], v.shape[2])
        widest = math.ceil(max(q.shape[2], v.shape[2]) / 64) * 64
        size = (TOKENS + 128 * (counts + 1)) * q.shape[1] * widest
        assert kernel.LARGEST is None or size <= IN_32_BITS
        assert kernel.LARGEST is None or all(x.stride(0) * TOKENS <= IN_32_BITS for x in (q, k, v))
    assert sum(q.shape[1] for q, *_ in calls) == heads


def test_every_kernel_that_counts_in_32_bits_says_so():
    limited = {name for name, (kernel, _) in KERNELS.items() if kernel.LARGEST is not None}
    assert limited == {"flash_attn_3", "flash_attn", "flash_attn_4", "torch_varlen", "flex"}
    assert all(kernel.LARGEST in (None, IN_32_BITS) for kernel, _ in KERNELS.values())
