"""``axolotl train`` with fa2patch's plugin: packed, it has the losses of padded training without fa2patch."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from in_stack import run_in

from compat_matrix.ecosystem.stacks import stacks

SCRIPT = Path(__file__).with_name("scripts") / "axolotl_runs.py"
NEAR = 1e-5

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("stack", ["axolotl-0.12.2", "axolotl-0.19.0"])]
CASES = (
    "padded", "padded, eight", "padded, patched", "packed", "packed, two rows", "packed, rows of axolotl",
    "dpo", "dpo, patched", "lora", "lora, packed", "axolotl train",
)  # fmt: skip


@functools.cache
def runs(stack: str) -> dict[str, Any]:
    found = run_in(stack, SCRIPT, *CASES)
    assert found.pop("version") == stacks()[stack].pins["axolotl"]
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert len(set(expected["losses"])) == len(expected["losses"]) == 4
    assert found["losses"] == pytest.approx(expected["losses"], rel=NEAR)
    assert found["norms"] == pytest.approx(expected["norms"], rel=NEAR)
    assert found["said"] and not expected["said"]


def test_packed_training_and_evaluation_have_the_losses_of_padded_ones(stack: str) -> None:
    found, padded = runs(stack)["packed"], runs(stack)["padded"]
    assert_same(found, padded)
    assert len(set(padded["eval"])) == len(padded["eval"]) == 2
    assert found["eval"] == pytest.approx(padded["eval"], rel=NEAR)
    assert found["verified"] == {"ok": True, "documents": 4}
    (said,) = found["said"][1:]  # attention of axolotl 0.12.2 is its own, and computed document by document
    assert said.startswith("fa2patch: the first step was packed. 2 of 2 layers were computed with: ")


def test_packed_adapters_have_the_losses_of_padded_ones(stack: str) -> None:
    found = runs(stack)["lora, packed"]
    assert_same(found, runs(stack)["lora"])
    assert found["losses"] != runs(stack)["packed"]["losses"]
    assert found["verified"] == {"ok": True, "documents": 4}


def test_the_command_trains_as_what_it_imports(stack: str) -> None:
    # The other trainings run what ``axolotl`` runs in processes, because its imports take as long as they do.
    assert_same(runs(stack)["axolotl train"], runs(stack)["padded"])


def test_several_rows_of_a_batch_are_one_row_without_padding(stack: str) -> None:
    # The padded batch is one of eight: axolotl 0.19 takes the mean of the means of accumulated batches.
    found = runs(stack)["packed, two rows"]
    assert_same(found, runs(stack)["padded, eight"])
    assert found["verified"] == {"ok": True, "documents": 8}
    assert found["batch"]["input_ids"][0] == 1


def test_rows_that_are_to_be_padded_stay_axolotls(stack: str) -> None:
    found = runs(stack)["packed, rows of axolotl"]
    assert_same(found, runs(stack)["padded"])
    assert "cu_seq_lens_q" not in found["batch"] and found["batch"]["input_ids"] == [1, 128]


@pytest.mark.parametrize("kind", ["padded", "dpo"])
def test_padded_batches_are_computed_packed(stack: str, kind: str) -> None:
    found, expected = runs(stack)[f"{kind}, patched"], runs(stack)[kind]
    assert_same(found, expected)
    assert max(found["tokens"]) < max(expected["tokens"])  # proofs run more of them, and none is padded
    assert found["models"] == (2 if kind == "dpo" else 1)
