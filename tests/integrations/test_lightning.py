"""Lightning trains with ``fa2patch.LightningCallback``, packed, with the losses of padded training without fa2patch."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from in_stack import run_in

from compat_matrix.ecosystem.stacks import stacks

SCRIPT = Path(__file__).with_name("scripts") / "lightning_steps.py"
STACKS = [
    ("pytorch-lightning-1.9.5", "pytorch_lightning"),
    ("lightning-2.0.9", "lightning.pytorch"),
    ("lightning-2.6.6", "lightning.pytorch"),
    ("lightning-2.6.6", "pytorch_lightning"),
]
NEAR = 1e-4  # the optimizer divides rounding by small gradients

pytestmark = [pytest.mark.slow, pytest.mark.parametrize(("stack", "package"), STACKS)]


@functools.cache
def runs(stack: str, package: str) -> dict[str, Any]:
    found = run_in(stack, SCRIPT, package)
    pins = " ".join(stacks()[stack].environment.pins)
    assert f"lightning=={found['version']}" in pins
    return found


def assert_same_losses(found: dict[str, Any], padded: dict[str, Any]) -> None:
    assert len(set(padded["losses"])) == len(padded["losses"]) == 8
    assert found["losses"] == pytest.approx(padded["losses"], rel=NEAR)
    assert found["test"] == pytest.approx(padded["test"], rel=NEAR)
    assert found["patched"] == ["net.llm"]


@pytest.mark.parametrize("where", ["packed", "packed, made in setup", "packed, made in configure_model"])
def test_rows_of_the_flattening_collator_train_and_test_as_padded_ones(stack: str, package: str, where: str) -> None:
    found = runs(stack, package)
    assert_same_losses(found[where], found["padded"])
    assert sum(found[where]["tokens"]) < 0.8 * sum(found["padded"]["tokens"])


def test_padded_batches_are_computed_packed_on_request(stack: str, package: str) -> None:
    found = runs(stack, package)
    assert_same_losses(found["padded batches"], found["padded"])
    assert sum(found["padded batches"]["tokens"]) < 0.8 * sum(found["padded"]["tokens"])


def test_passes_in_manual_optimization_make_the_steps_of_padded_batches(stack: str, package: str) -> None:
    found = runs(stack, package)
    assert_same_losses(found["passes"], found["padded"])
    assert max(found["passes"]["passes"]) <= 40 and len(found["passes"]["passes"]) > 8
