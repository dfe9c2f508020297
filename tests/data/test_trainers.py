"""TRL's trainers with their padded batches computed packed, equal prompts once: the same losses and metrics."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fa2patch
from compat_matrix import environments, tiny_models
from compat_matrix.ecosystem.stacks import stacks
from fa2patch.errors import Fa2PatchError
from fa2patch.preference import trainer_class

ROOT = Path(__file__).parents[2]
NEWEST, OLDER = "trl-1.16.0", "trl-0.19.1"


def test_no_trl() -> None:
    code = (
        "import sys; sys.modules['trl'] = None\n"
        "import fa2patch.errors, fa2patch.preference as p\n"
        "try: p.trainer_class()\nexcept fa2patch.errors.Fa2PatchError as e: sys.exit('pip install trl' not in str(e))\n"
        "sys.exit(1)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class Trainer:
    """The arguments of TRL's. The slow tests use TRL's own."""

    def __init__(self, model: Any, ref_model: Any) -> None:
        self.model, self.ref_model = model, ref_model


def test_trainer_class_patches_model_and_reference() -> None:
    model, reference = tiny_models.build("llama", "sdpa"), tiny_models.build("llama", "sdpa")
    trainer = trainer_class(Trainer)(model, ref_model=reference)
    assert isinstance(trainer, Trainer)
    assert fa2patch.status(model).active
    assert fa2patch.status(reference).active
    assert trainer_class(Trainer)(model, None).ref_model is None
    assert issubclass(Fa2PatchError, Exception)


@pytest.mark.parametrize(("share", "tokens"), [(True, 40 + 3 * 5), (False, 3 * 45)])
def test_trainer_class_shares_prompts(share: bool, tokens: int) -> None:
    model = tiny_models.build("llama", "sdpa")
    prompts, ends = torch.arange(5, 45).expand(3, -1), torch.arange(50, 65).view(3, 5)
    ids = torch.cat([torch.zeros(3, 1, dtype=torch.long), prompts, ends], 1)
    trainer_class(Trainer, share_prompts=share)(model, None)
    seen: list[int] = []
    model.model.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((args[0] if args else kwargs["hidden_states"])[..., 0].numel()),
        with_kwargs=True,
    )
    model(input_ids=ids, attention_mask=(ids != 0).long(), use_cache=False)
    assert seen == [tokens]


@functools.cache
def steps(stack: str, script: str, *arguments: str) -> dict[str, Any]:
    wanted = stacks()[stack]
    python = environments.make(wanted.environment, ROOT / ".compat")
    with environments.only_our_packages() as packages:
        variables = {**os.environ, **wanted.variables, "PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1"}
        command = [str(python), str(Path(__file__).with_name(script)), *arguments]
        done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["trl"] == wanted.trl
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any], steps: int, rel: float = 1e-4) -> None:
    """Require the same losses and metrics. Each value may differ by a part of the largest one of its kind.

    A loss of GRPO or RLOO is a sum of advantages that cancel each other, so it is close to 0 in some steps.
    """
    assert found["generated"] == expected["generated"]
    assert len(found["losses"]) == len(expected["losses"]) >= steps
    assert len(set(expected["losses"])) > steps / 2
    ours, theirs = ({"losses": run["losses"], **by_name(run["logs"])} for run in (found, expected))
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        assert ours[name] == pytest.approx(values, rel=0, abs=rel * max(map(abs, values)) + 1e-9), name


def by_name(logs: list[dict[str, Any]]) -> dict[str, list[float]]:
    """The values of each metric."""
    found: dict[str, list[float]] = {}
    for entry in logs:
        for name, value in entry.items():
            if isinstance(value, (int, float)):
                found.setdefault(name, []).append(value)
    return found


PACKED = {"sigmoid": 0.7, "ipo": 0.7, "lora": 0.85}
"""The part of the tokens that is computed without padding. A model with an adapter is proven on its first batch."""


@pytest.mark.slow
@pytest.mark.parametrize("stack", ["trl-0.12.2", OLDER, NEWEST])
@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "lora"])
def test_dpo_trains_packed_as_padded(stack: str, loss: str) -> None:
    expected, found = (steps(stack, "dpo_steps.py", how, loss) for how in ("padded", "packed"))
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5, abs=1e-5)
    assert len(set(expected["losses"])) == 10
    assert sum(found["tokens"]) < PACKED[loss] * sum(expected["tokens"])


@pytest.mark.slow
@pytest.mark.parametrize("stack", [OLDER, NEWEST])
@pytest.mark.parametrize(("loss", "number"), [("sigmoid", "50"), ("lora", "10")])
def test_dpo_trains_with_shared_prompts_as_padded(stack: str, loss: str, number: str) -> None:
    expected, packed, found = (
        steps(stack, "dpo_steps.py", how, loss, number) for how in ("padded", "packed", "shared")
    )
    assert_same(found, expected, int(number))
    assert sum(found["tokens"]) < 0.7 * sum(packed["tokens"])
    assert sum(packed["tokens"]) < PACKED[loss] * sum(expected["tokens"])


@pytest.mark.slow
def test_trls_own_padding_free_on_patched_models() -> None:
    """It is right for the sigmoid loss. For ``ipo`` TRL 0.19.1 divides each sum by the whole row's tokens."""
    expected, found = (steps(OLDER, "dpo_steps.py", how) for how in ("padded", "padding_free"))
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5, abs=1e-5)
    assert sum(found["tokens"]) < 0.7 * sum(expected["tokens"])


RUNS = [("grpo", "full", "50"), ("grpo", "lora", "8"), ("grpo", "checkpointing", "8"), ("rloo", "full", "50")]


@pytest.mark.slow
@pytest.mark.parametrize("stack", [OLDER, NEWEST])
@pytest.mark.parametrize(("kind", "variant", "number"), RUNS, ids=["-".join(run[:2]) for run in RUNS])
def test_reinforcement_learning_with_shared_prompts_as_padded(stack: str, kind: str, variant: str, number: str) -> None:
    expected, packed, found = (
        steps(stack, "rl_steps.py", kind, how, variant, number) for how in ("padded", "packed", "shared")
    )
    assert_same(found, expected, int(number))
    assert_same(packed, expected, int(number))
    assert [bool(run["again"]) for run in (expected, packed, found)] == [variant == "checkpointing"] * 3
    assert sum(found["tokens"]) < 0.65 * sum(packed["tokens"]) < 0.65 * sum(expected["tokens"])
