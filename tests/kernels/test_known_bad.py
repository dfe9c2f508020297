"""Builds that are known to be bad are not tried: a trial might never return, or believe them."""

import pytest
import torch
from definition_cases import asks
from torch.torch_version import TorchVersion

from fa2patch.kernels import known_bad, protocol, trial, varlen
from fa2patch.kernels.reference import Reference
from fa2patch.kernels.varlen import FlashAttn, FlashAttn4

CPU = torch.device("cpu")
CALLS = [
    # distribution, first bad version, first good one, capability, what is asked
    ("flash-attn-4", "4.0.0b11", "4.0.0b20", (10, 0), asks(dim=256)),
    ("flash-attn-4", "4.0.0b11", "4.0.0b20", (10, 3), asks(dim=160)),
    ("flash-attn-4", "4.0.0b9", "4.0.0b13", (9, 0), asks(["softcap"])),
    ("flash-attn-4", "4.0.0b0", "4.0.0b5", (9, 0), asks(dim=64)),
    ("flash-attn-4", "4.0.0b0", "4.0.0b18", (10, 0), asks()),
    ("flash-attn-4", "4.0.0b0", "4.0.0b28", (12, 0), asks()),
    ("nvidia-cutlass-dsl", "4.6.0", "4.6.2", (10, 3), asks()),
]
OTHER_CALLS = [
    ("4.0.0b19", (9, 0), asks(dim=256)),
    ("4.0.0b19", (10, 0), asks(dim=192, value_dim=128)),
    ("4.0.0b12", (9, 0), asks(["softcap"])._replace(gradients=False)),
    ("4.0.0b4", (9, 0), asks(dim=128)),
]


@pytest.fixture
def machine(monkeypatch):
    # ``here`` is a capability, and ``versions`` are those of distributions.

    def put(here, **versions):
        monkeypatch.setattr(known_bad, "capability", lambda: here)
        monkeypatch.setattr(varlen, "capability", lambda: here)
        monkeypatch.setattr(known_bad, "version", lambda name: versions.get(name.replace("-", "_")))

    return put


@pytest.mark.parametrize(("distribution", "since", "before", "here", "asked"), CALLS)
def test_a_build_is_known_from_the_first_bad_version_to_the_first_good_one(
    machine, distribution, since, before, here, asked
):
    installed = {"flash_attn_4": "4.0.0b40", "nvidia_cutlass_dsl": "4.6.2"}
    for version, bad in ((since, True), (before, False)):
        machine(here, **{**installed, distribution.replace("-", "_"): version})
        reason = known_bad.known_bad(FlashAttn4(), asked)
        assert bad is bool(reason)
        assert not bad or all(word in reason for word in (distribution, version, before, "#"))
    assert known_bad.known_bad(FlashAttn(), asked) == ""


@pytest.mark.parametrize(("version", "here", "asked"), OTHER_CALLS)
def test_other_calls_of_the_same_build_are_tried(machine, version, here, asked):
    machine(here, flash_attn_4=version, nvidia_cutlass_dsl="4.6.2")
    assert known_bad.known_bad(FlashAttn4(), asked) == ""


def test_nothing_is_known_without_the_distribution_or_the_device(machine, monkeypatch):
    machine((10, 0))
    assert known_bad.known_bad(FlashAttn4(), asks(dim=256)) == ""
    machine(None, flash_attn_4="4.0.0b11")
    assert known_bad.known_bad(FlashAttn4(), asks(dim=256)) == ""


def test_versions_are_read_from_the_distributions_that_are_installed():
    assert known_bad.version("no-such-distribution") is None
    assert TorchVersion(known_bad.version("torch")) == torch.__version__


def test_a_known_build_is_not_called(monkeypatch):
    called = []

    class Counted(Reference):
        def attend(self, *given):
            called.append(given)
            return super().attend(*given)

    row = known_bad.TABLE[0]._replace(
        kernel=Counted, distribution="torch", since="0", before="99", calls=lambda asked, here: True
    )
    monkeypatch.setattr(known_bad, "TABLE", (row,))
    monkeypatch.setattr(known_bad, "capability", lambda: (9, 0))
    able, reason = trial.passes_trial(Counted(), asks(), CPU)
    assert not able and not called
    assert reason == (
        f"torch {known_bad.version('torch')} is known to be bad: {row.what} ({row.source}). Use 99 or later"
    )
    assert protocol.capability() is None, "this machine has no such device"
