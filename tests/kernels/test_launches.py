"""A layer starts its kernel on a GPU, and nothing else where the kernel takes what the layer has."""

import functools

import fake_kernels
import pytest
import torch

from compat_matrix.bench.operators import counted

KERNELS = ("flash_attn_3", "flash_attn", "flash_attn_4", "torch_varlen", "efficient", "flex")


@functools.cache
def traced(name, case):
    return fake_kernels.trace(*fake_kernels.kernels()[name], fake_kernels.CASES[case])


OPERATORS = {
    "a view": (lambda x: x.transpose(0, 1)[None].flatten(0, 1), {}),
    "an allocation": (lambda x: x.new_empty(3), {}),
    "arithmetic": (lambda x: x * 2 + 1, {"others": 2}),
    "padding": (lambda x: torch.nn.functional.pad(x, (0, 1)), {"copies": 1}),
    "contiguous": (lambda x: x.transpose(0, 1).contiguous(), {"copies": 1}),
    "contiguous already": (lambda x: x.contiguous(), {}),
    "a dtype": (lambda x: x.double(), {"copies": 1}),
    "gathering": (lambda x: x.index_select(0, torch.tensor([1])), {"copies": 1}),
    "item": (lambda x: x.sum().item(), {"others": 1, "reads": 1}),
    "nonzero": (lambda x: x.nonzero(), {"reads": 1}),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_is_counted_by_its_kind(name):
    call, expected = OPERATORS[name]
    states = torch.ones(2, 3)
    with counted() as found:
        call(states)
    assert {kind: count for kind, count in found.items() if count} == expected


@pytest.mark.parametrize("case", ["plain", "grouped heads", "window", "head dim 80"])
@pytest.mark.parametrize("name", KERNELS)
def test_an_ordinary_layer_starts_its_kernel_and_nothing_else(name, case):
    found, plain = traced(name, case), traced(name, "plain")
    if "why" in found:
        assert (name, case) == ("efficient", "window")
        return
    for way in ("forward", "backward"):
        if "why" in found[way]:
            assert (name, way) == ("efficient", "backward")
            assert "meta__efficient_attention_backward" in found[way]["why"]
        elif (name, case) == ("efficient", "grouped heads"):
            assert found[way]["later"]["copies"] == 2, "k and v are repeated"
        elif (name, case) == ("flash_attn_4", "head dim 80"):
            assert found[way]["later"]["copies"] == 4, "q, k and v are padded to 96, and the output is cut"
        else:
            assert found[way]["later"] == plain[way]["bare"]


@pytest.mark.parametrize("name", KERNELS)
def test_values_of_another_head_dimension_are_copied_only_where_the_kernel_needs_it(name):
    later = traced(name, "MLA")["forward"]["later"]
    assert later["copies"] == (2 if name in ("flash_attn", "torch_varlen") else 0)


@pytest.mark.parametrize("case", fake_kernels.CASES)
@pytest.mark.parametrize("name", KERNELS)
def test_no_layer_reads_from_the_device(name, case):
    found = traced(name, case)
    for way in ("forward", "backward"):
        for counts in found.get(way, {}).values():
            assert isinstance(counts, str) or counts["reads"] == 0
