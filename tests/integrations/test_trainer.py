"""``Trainer(..., callbacks=[fa2patch.TrainerCallback()])`` trains packed rows with the losses of padded training."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from in_stack import run_in

SCRIPT = Path(__file__).with_name("scripts") / "trainer_callback.py"
STACKS = ["transformers-4.36.2", "transformers-4.57.6", "transformers-5.23.0"]

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("stack", STACKS)]


@functools.cache
def runs(stack: str) -> dict[str, Any]:
    return run_in(stack, SCRIPT)


def difference(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other))


@pytest.mark.parametrize("how", ["a model", "added", "padded batches"])
def test_the_callback_patches_the_model_of_a_trainer(stack: str, how: str) -> None:
    found = runs(stack)
    assert found[how] == pytest.approx(found["padded"], rel=1e-4)
    assert len(set(found[how])) == 4
    assert difference(found["leaking"], found["padded"]) > 0.1


def test_the_callback_patches_what_model_init_returns_for_each_training(stack: str) -> None:
    found = runs(stack)
    assert found["patch"] is True
    for losses in found["model_init"]:
        assert losses == pytest.approx(found["padded"], rel=1e-4)


def test_a_model_of_model_init_is_patched_after_accelerate_has_wrapped_its_forward_for_bf16(stack: str) -> None:
    found = runs(stack)
    assert difference(found["bf16"], found["padded bf16"]) < 0.02  # of losses near 5: three digits of bfloat16
    assert difference(found["leaking bf16"], found["padded bf16"]) > 0.1


def test_the_callback_patches_for_an_evaluation_without_training_or_says_that_it_was_added_late(stack: str) -> None:
    found = runs(stack)
    assert found["evaluated"] == pytest.approx(found["padded evaluated"], rel=1e-4)
    assert "was added later" in found["late"] and "callbacks=[fa2patch.TrainerCallback()]" in found["late"]


def test_padded_batches_are_computed_packed_on_request(stack: str) -> None:
    found = runs(stack)
    assert sum(found["first"]) == sum(found["documents"])
