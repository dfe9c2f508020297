"""ms-swift with fa2patch's plugin: without flash attention, packed, it has the losses of padded training."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from in_stack import run_in

from compat_matrix.ecosystem.stacks import stacks

SCRIPT = Path(__file__).with_name("scripts") / "ms_swift_runs.py"
NEAR = 1e-5

NEWEST = "ms-swift-4.6.0"

pytestmark = pytest.mark.slow
every_stack = pytest.mark.parametrize("stack", ["ms-swift-3.10.0", NEWEST])
KINDS = ("padded", "dpo", "lora", "embedding")
GRPO = ("grpo, patched", "grpo, padding_free")
FREE = {kind: "padding_free" if kind == "padded" else f"{kind}, padding_free" for kind in KINDS}


@functools.cache
def runs(stack: str) -> dict[str, Any]:
    padded = ("padded, patched", "reranker", "reranker, patched")
    grpo = ("grpo", *GRPO) if stack == NEWEST else ()
    found = run_in(stack, SCRIPT, *KINDS, *FREE.values(), *padded, "packing", "refused", "swift sft", *grpo)
    assert found.pop("version") == stacks()[stack].pins["ms-swift"]
    return found


def logged(run: dict[str, Any], name: str) -> list[float]:
    return [entry[name] for entry in run["logs"] if name in entry]


def losses(run: dict[str, Any]) -> list[float]:
    return logged(run, "loss")


@every_stack
@pytest.mark.parametrize("kind", KINDS)
def test_padding_free_training_has_the_losses_of_padded_training(stack: str, kind: str) -> None:
    found, expected = runs(stack)[FREE[kind]], runs(stack)[kind]
    assert len(set(losses(expected))) == len(losses(expected)) == 4
    assert losses(found) == pytest.approx(losses(expected), rel=NEAR)
    assert found["batch"]["input_ids"][0] == 1 < expected["batch"]["input_ids"][0]
    assert found["said"] and not expected["said"]


@every_stack
def test_the_command_trains_as_what_it_starts(stack: str) -> None:
    found, expected = runs(stack)["swift sft"], runs(stack)["padded"]
    assert losses(found) == pytest.approx(losses(expected), rel=NEAR)
    assert found["verified"] == {"ok": True, "documents": 4}
    assert found["said"][1:] == ["fa2patch: the first step was packed. 2 of 2 layers were computed with: reference."]


@every_stack
def test_the_first_batch_is_verified(stack: str) -> None:
    assert runs(stack)["padding_free"]["verified"] == {"ok": True, "documents": 4}


@every_stack
def test_packed_rows_have_the_loss_of_their_documents_alone(stack: str) -> None:
    found = runs(stack)["packing"]
    assert losses(found) == pytest.approx(found["alone"], rel=NEAR)
    assert found["verified"]["ok"] and found["verified"]["documents"] > 1


@pytest.mark.parametrize("stack", [NEWEST])  # 3.10.0 imports vLLM for GRPO, also with --use_vllm false
@pytest.mark.parametrize("way", GRPO)
def test_grpo_has_the_steps_of_padded_training(stack: str, way: str) -> None:
    # GRPO's loss is a sum that cancels but for rounding, so the gradients' size and the divergence tell more.
    found, expected = runs(stack)[way], runs(stack)["grpo"]
    for name in ("grad_norm", "kl", "reward"):
        assert len(logged(expected, name)) == 4
        assert logged(found, name) == pytest.approx(logged(expected, name), rel=NEAR)
    assert losses(found) == pytest.approx(losses(expected), abs=1e-6)
    assert {*found["tokens"]} - {*expected["tokens"]}  # a completion is shorter than its row, or is run alone to prove
    assert found["said"] and not expected["said"]


@every_stack
@pytest.mark.parametrize("kind", ["padded", "reranker"])
def test_padded_batches_are_computed_packed(stack: str, kind: str) -> None:
    found, expected = runs(stack)[f"{kind}, patched"], runs(stack)[kind]
    assert losses(found) == pytest.approx(losses(expected), rel=NEAR)
    assert max(found["tokens"]) < max(expected["tokens"])  # proofs run more of them, and none is padded


@every_stack
def test_ms_swift_refuses_without_the_plugin(stack: str) -> None:
    assert "requires a flash attention implementation" in runs(stack)["refused"]["refused"]
