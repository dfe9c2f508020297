"""The trial believes no kernel with a planted fault, and every right one that rounds as those on a GPU do."""

import itertools

import pytest
import torch
from definition_cases import asks
from planted_faults import FAULTS, WITH_GROUPS, WITH_SINKS, Planted
from rounding_kernel import Rounding

from fa2patch.kernels import trial
from fa2patch.kernels.reference import Reference

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OF_BFLOAT16 = ("sinks of float32 read as bfloat16", "sinks 10 % off beside bfloat16")
PLANTED = [
    *itertools.product(FAULTS.items(), [()], [4], DTYPES),
    *itertools.product(WITH_GROUPS.items(), [()], [2], DTYPES),
    *(
        case
        for case in itertools.product(WITH_SINKS.items(), [("sinks",)], [4], DTYPES)
        if case[3] == torch.bfloat16 or case[0][0] not in OF_BFLOAT16
        if case[3] != torch.float32 or "another dtype" not in case[0][0]
    ),
]


@pytest.mark.parametrize(
    ("fault", "features", "key_heads", "dtype"), PLANTED, ids=lambda each: each[0] if isinstance(each, tuple) and each
    else str(each),
)  # fmt: skip
def test_a_planted_fault_is_not_believed(fault, features, key_heads, dtype):
    able, reason = trial.passes_trial(Planted(fault[1]), asks(features, dtype=dtype, key_heads=key_heads), CPU)
    assert not able and reason.startswith("tried on this machine")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (8, 8), (256, 256), (192, 128)], ids=str)
@pytest.mark.parametrize(
    ("features", "causal", "key_heads"), [((), True, 4), ((), True, 1), ((), False, 2), (("window",), True, 2)]
)
def test_right_kernels_are_far_from_the_bound(monkeypatch, features, causal, key_heads, dims, dtype):
    # They must be believed with two thirds of the bound: other machines round otherwise.
    monkeypatch.setitem(trial.BOUNDS, dtype, trial.BOUNDS[dtype] * 2 / 3)
    monkeypatch.setitem(trial.ROUNDING, dtype, trial.ROUNDING[dtype] * 2 / 3)
    asked = asks(features, dtype=dtype, dim=dims[0], value_dim=dims[1], key_heads=key_heads, causal=causal)
    assert trial.passes_trial(Rounding(), asked, CPU) == (True, "")


class Counted(Reference):
    def __init__(self):
        self.calls = 0

    def __call__(self, *given):
        self.calls += 1
        return super().__call__(*given)


def test_a_trial_calls_the_kernel_twice():
    kernel = Counted()
    for _ in range(3):
        assert trial.passes_trial(kernel, asks(), CPU) == (True, "")
    assert kernel.calls == 2
