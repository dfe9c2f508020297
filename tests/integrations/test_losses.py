"""Losses of trainers and of other packages on packed rows, with weights and without, with the real packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from in_stack import run_in

pytestmark = pytest.mark.slow
SCRIPTS = Path(__file__).with_name("scripts")
# Bound on a relative difference: Trainer's log has four digits before Transformers 5.
CLOSE = 2e-5

FUSED = ("liger_on_the_class", "liger_on_the_object", "cut_cross_entropy")


def losses(stack: str, *cases: str) -> dict[str, Any]:
    return run_in(stack, SCRIPTS / "losses_of_trainers.py", *cases)


def assert_close(found: dict[str, Any]) -> None:
    assert found["loss"] < CLOSE and found["weight"] < CLOSE, found


@pytest.mark.parametrize("stack", ["transformers-4.36.2", "transformers-4.57.6", "transformers-5.23.0"])
def test_trainers_losses_are_those_of_padded_training(stack: str) -> None:
    found = losses(stack, "plain", "label_smoothing", "compute_loss_func")
    if stack == "transformers-4.36.2":
        assert found.pop("compute_loss_func") == {"skipped": "this Trainer has no compute_loss_func"}
    for case in found.values():
        assert_close(case)


@pytest.mark.parametrize("weights", ["document", "token"])
@pytest.mark.parametrize("stack", ["transformers-4.36.2", "transformers-4.57.6", "transformers-5.23.0"])
def test_a_loss_with_weights_is_that_of_padded_training_or_refused(stack: str, weights: str) -> None:
    # Weights of documents: that of documents one to a batch.
    cases = [weights, f"{weights}_with_label_smoothing", f"{weights}_with_compute_loss_func"]
    found = losses(stack, *(cases[:2] if stack == "transformers-4.36.2" else cases))
    assert_close(found.pop(weights))
    assert found and {case["refused"] for case in found.values()} == {"BadBatch"}


@pytest.mark.parametrize("stack", ["trl-0.12.2", "trl-0.19.1"])
def test_sfttrainer_of_older_trl_trains_with_weights(stack: str) -> None:
    for case in losses(stack, "document", "token").values():
        assert_close(case)


@pytest.mark.parametrize("stack", ["trl-1.16.0"])
def test_sfttrainers_loss_types_are_those_of_padded_training(stack: str) -> None:
    for case in losses(stack, "plain", "chunked_nll", "dft").values():
        assert_close(case)


@pytest.mark.parametrize("stack", ["trl-1.16.0"])
def test_sfttrainers_fused_head_is_refused_with_weights_and_trainers_loss_is_right(stack: str) -> None:
    refused = [f"{by}{option}" for by in ("document", "token") for option in ("", "_with_dft")]
    right = ["document_with_trainers_own_loss", "token_with_trainers_own_loss"]
    found = losses(stack, *refused, *right)
    for case in right:
        assert_close(found.pop(case))
    for case in found.values():
        assert case["refused"] == "BadBatch" and "TRL's fused head" in case["message"]


@pytest.mark.parametrize("stack", ["losses-4.44.2"])
def test_fused_losses_of_old_releases_are_right_or_refused(stack: str) -> None:
    # Liger 0.3.0 and cut-cross-entropy 24.11.4; tests/stacks/test_fused_losses.py runs with the newest ones.
    for cases in run_in(stack, SCRIPTS / "fused_losses.py", *FUSED).values():
        assert len(cases) == 8
        for case, said in cases.items():
            past = case.startswith("after") and case.endswith("LoRA")  # PEFT 0.12 calls model.forward(...)
            assert said == ("refused: PackingNotIsolated" if past else "right"), (case, said)


@pytest.mark.parametrize("stack", ["losses-4.44.2", "fused-losses"])
@pytest.mark.parametrize("weights", ["document", "token"])
def test_fused_losses_with_weights_are_right_or_refused(stack: str, weights: str) -> None:
    found = run_in(stack, SCRIPTS / "fused_losses.py", *(f"{name} by {weights}" for name in FUSED))
    for name, cases in found.items():
        assert len(cases) == 8
        for case, said in cases.items():
            right = case.startswith("before")  # these forwards return logits if there are no labels
            assert said == "right" if right else said.startswith("refused: "), (name, case, said)
