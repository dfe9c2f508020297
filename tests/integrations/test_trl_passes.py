"""Fifty steps of TRL's trainers in passes of three budgets are those of padded training: losses and weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from in_stack import run_in

SCRIPT = Path(__file__).with_name("scripts") / "trl_passes.py"
STEPS = 50
OLDER, NEWEST = "trl-0.19.1", "trl-1.16.0"
DPO = (
    "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero",
    "apo_down", "discopop", "sft", "sigmoid_norm",
)  # fmt: skip
TRAINED = [
    *[(NEWEST, f"{name}Trainer") for name in ("SFT", "DPO", "KTO", "ORPO", "CPO", "Reward", "GRPO", "RLOO")],
    (NEWEST, "GKDTrainer"),
    (NEWEST, "DistillationTrainer"),
    (OLDER, "PRMTrainer"),
    *[(NEWEST, f"DPOTrainer:{loss}") for loss in DPO],
    (NEWEST, "KTOTrainer:apo_zero_unpaired"),
    *[(NEWEST, f"CPOTrainer:{loss}") for loss in ("simpo", "hinge", "ipo")],
    *[(NEWEST, f"GRPOTrainer:{loss}") for loss in ("grpo", "bnpo", "dr_grpo", "dapo")],
    (NEWEST, "SFTTrainer:dft"),
]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("stack", "trainer"), TRAINED)
def test_fifty_steps_in_passes_are_those_of_padded_batches(stack: str, trainer: str) -> None:
    found = run_in(stack, SCRIPT, trainer)["trainers"][trainer]
    assert found["steps"] >= STEPS and found["moved"] > 3e-3
    assert found["half"]["passes"] > 1.5 * STEPS and found["twice"]["passes"] == found["once"]["passes"]
    for share in ("twice", "once", "half"):
        assert max(found[share]["losses"], found[share]["weights"]) < 1e-5, (share, found)
        assert found[share]["padded"] == 0
    in_passes, padded = found["bf16"]
    assert in_passes < 1.5 * padded + 1e-5, "chance decides which one training is nearer to float32: the bench has more"
