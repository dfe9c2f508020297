"""``fa2patch run ... llamafactory-cli train``: the losses are those of padded training without fa2patch."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from in_stack import run_in

from compat_matrix.ecosystem.stacks import stacks

SCRIPT = Path(__file__).with_name("scripts") / "llama_factory_runs.py"
NEAR = 1e-5
PATCHED = {"padded": "padded, budget", "lora": "lora, budget", "dpo": "dpo, patched"}

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("stack", ["llama-factory-0.9.5"])]


@functools.cache
def run(stack: str, case: str) -> dict[str, Any]:
    found = run_in(stack, SCRIPT, case)
    assert found["version"] == stacks()[stack].pins["llamafactory"]
    return dict(found[case])


def logged(found: dict[str, Any], name: str) -> list[float]:
    return [entry[name] for entry in found["logs"] if name in entry]


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert len(set(logged(expected, "loss"))) == 4
    for name in ("loss", "grad_norm"):
        assert logged(found, name) == pytest.approx(logged(expected, name), rel=NEAR)
    assert found["said"] and not expected["said"]


@pytest.mark.parametrize("kind", PATCHED)
def test_padded_batches_are_computed_without_their_padding(stack: str, kind: str) -> None:
    found, expected = run(stack, PATCHED[kind]), run(stack, kind)
    assert_same(found, expected)
    assert found["batch"] == expected["batch"] and found["batch"]["input_ids"][0] > 1
    assert found["tokens"][-1] < 0.8 * expected["tokens"][-1]  # the first forwards prove more than they train


def test_a_row_of_neat_packing_has_the_losses_of_its_documents_padded(stack: str) -> None:
    found = run(stack, "neat, fa2")
    assert_same(found, run(stack, "padded"))
    assert found["batch"]["input_ids"][0] == 1
    assert found["verified"] == {"ok": True, "documents": 8}


def test_neat_packing_with_sdpa_is_llama_factorys_own(stack: str) -> None:
    # LLaMA-Factory's mask for every query isolates the documents, in a row that is filled with padding.
    found = run(stack, "neat, sdpa")
    assert_same(found, run(stack, "padded"))
    assert len(found["batch"]["attention_mask"]) == 4
