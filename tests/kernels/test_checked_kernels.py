"""The comparison that kernels are held to on a GPU, made with kernels that run here."""

from dataclasses import replace

import pytest
import torch

from compat_matrix.check import kernels as checked
from compat_matrix.check.kernels import Case, compared, refusal
from fa2patch.kernels.reference import Reference

SHORT = (1, 20, 7, 13)


class OneTokenWider(Reference):
    def __call__(self, q, k, v, boundaries, options):
        return super().__call__(q, k, v, boundaries, replace(options, window=options.window + 1))


class WithoutSinksGradient(Reference):
    def __call__(self, q, k, v, boundaries, options):
        output = super().__call__(q, k, v, boundaries, replace(options, sinks=options.sinks.detach()))
        return output + 0 * options.sinks.sum()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("feature", checked.FEATURES)
@pytest.mark.parametrize("layout", ["causal", "both ways", "tree"])
def test_the_reference_is_right_in_every_case(feature, layout, dtype):
    case = Case(feature, layout, groups=2, dim=16, value_dim=16, dtype=dtype, lengths=SHORT)
    assert not refusal(Reference(), case, "cpu")
    errors = compared(Reference(), case, "cpu")
    assert {name: error for name, error in errors.items() if not error.ok} == {}
    assert ("dsinks" in errors) == ("sinks" in feature)


@pytest.mark.parametrize(
    ("kernel", "feature", "wrong"), [(OneTokenWider(), "window", "output"), (WithoutSinksGradient(), "sinks", "dsinks")]
)
def test_a_wrong_kernel_is_noticed(kernel, feature, wrong):
    errors = compared(kernel, Case(feature, dim=16, value_dim=16, lengths=(1, 90, 7)), "cpu")
    assert not errors[wrong].ok


def test_nan_is_no_small_error():
    assert not checked.Error(float("nan"), 1.0, 1.0).ok


def test_cases_cover_every_feature_layout_and_dtype_and_mla():
    found = checked.cases().values()
    assert {case.feature for case in found} == set(checked.FEATURES)
    assert {case.layout for case in found} == set(checked.LAYOUTS)
    assert len({case.dtype for case in found}) == 3
    assert any(case.dim != case.value_dim for case in found) and any(len(case.lengths) > 100 for case in found)
