"""TRL's trainers with their padded batches computed packed: the same batches, losses and metrics, fewer tokens."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from in_stack import run_in

from compat_matrix.ecosystem.stacks import stacks

SCRIPTS = Path(__file__).with_name("scripts")
OLD, OLDER, NEWEST = "trl-0.12.2", "trl-0.19.1", "trl-1.16.0"
STEPS = 30

pytestmark = pytest.mark.slow


@functools.cache
def runs(stack: str, kind: str) -> dict[str, Any]:
    # One process does all runs of a trainer, because imports take most of the time.
    jobs = [f"{variant}:{number}:{','.join(ways)}" for variant, (number, ways) in variants(stack, kind).items()]
    script = "trl_groups.py" if kind in ("grpo", "rloo") else "trl_pairs.py"
    found = run_in(stack, SCRIPTS / script, kind, *jobs)
    assert found.pop("trl") == stacks()[stack].pins["trl"]
    return found


def by_name(run: dict[str, Any]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"losses": run["losses"]}
    for entry in run["logs"]:
        for name, value in entry.items():
            if isinstance(value, (int, float)):
                found.setdefault(name, []).append(value)
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any], but: str = "nothing", rel: float = 1e-4) -> None:
    # Each value may differ by a part of the largest one of its kind. A loss of GRPO or RLOO is a sum of advantages that
    # cancel each other, so it is close to 0 in some steps.
    assert found["generated"] == expected["generated"]
    ours, theirs = by_name(found), by_name(expected)
    assert ours.keys() == theirs.keys()
    assert len(set(theirs["losses"])) > len(theirs["losses"]) / 2
    for name, values in theirs.items():
        if but not in name:
            assert ours[name] == pytest.approx(values, rel=0, abs=rel * max(map(abs, values)) + 1e-9), name


def assert_packed(found: dict[str, Any], expected: dict[str, Any]) -> None:
    # Layers must see the real tokens of each call, and all tokens of the calls of ``generate``. A proof also runs one
    # document alone: the recorder's hook is code that fa2patch does not know.
    calls = [call[:2] for call in expected["calls"]]
    assert [call[:2] for call in found["calls"]] == calls, "the trainer made other batches"
    assert {tuple(call[2:]) == (call[0],) for call in expected["calls"]} == {True}
    assert all(call[-1] == max(call[2:]) == call[1] for call in found["calls"])
    assert sum(real for _, real in calls) < 0.9 * sum(padded for padded, _ in calls)
    assert_untouched(found, expected)


def assert_shared(found: dict[str, Any], packed: dict[str, Any]) -> None:
    # Layers must see less than the real tokens.
    assert [call[:2] for call in found["calls"]] == [call[:2] for call in packed["calls"]]
    assert sum(call[-1] for call in found["calls"]) < 0.85 * sum(call[-1] for call in packed["calls"])
    assert_untouched(found, packed)


def assert_untouched(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["cached"] == expected["cached"]
    assert all(call[2:] == [call[0]] for call in found["cached"])
    assert (found["no_grad"], found["models"]) == (expected["no_grad"], expected["models"])


PAIRS = [
    *[(stack, kind) for kind in ("dpo", "kto", "orpo", "cpo", "reward") for stack in (OLD, OLDER, NEWEST)],
    (OLDER, "prm"),  # 0.12.2 has no PRMTrainer yet, and 1.16.0 none any more
]
GROUPS = [(OLD, "rloo"), *[(stack, kind) for kind in ("grpo", "rloo") for stack in (OLDER, NEWEST)]]
# The first RLOOTrainer has no form with an adapter, and a gradient checkpointing that is its own.
OF_TWO_POLICIES = [(OLD, "rloo"), (OLDER, "rloo")]

# Here TRL's ``logits/...`` are means or sums of all logits of a batch, those at padding included.
OF_PADDING = [
    *[(stack, kind) for kind in ("orpo", "cpo") for stack in (OLD, OLDER, NEWEST)],
    (OLD, "kto"),
    (OLDER, "kto"),
]


def variants(stack: str, kind: str) -> dict[str, tuple[int, list[str]]]:
    # The number of steps and the ways of each variant.
    short = (10, ["padded", "packed"])
    if stack.startswith("liger"):
        return {"liger": (6, ["padded", "packed"])}
    if kind in ("grpo", "rloo"):
        found = {"reward_model": (STEPS, ["padded", "packed", "shared"])}
        more = [] if (stack, kind) in OF_TWO_POLICIES else ["lora", "checkpointing"]
        return {**found, **{variant: (8, ["padded", "packed", "shared"]) for variant in more}}
    shared = ["shared"] if kind in ("dpo", "orpo", "cpo") else []
    zeroed = ["zeroed"] if (stack, kind) in OF_PADDING else []
    found = {"full": (STEPS, ["padded", "packed", *shared, *zeroed]), "lora": short}
    if kind in ("dpo", "kto"):
        found["precompute"] = short
    if kind == "dpo":
        found["ipo"] = short
    return found


@pytest.mark.parametrize(("stack", "kind"), PAIRS)
def test_trainer_has_the_losses_and_metrics_of_padded_batches(stack: str, kind: str) -> None:
    # Metrics that count padding are those of a padded run in which hidden states at padding are zero.
    found = runs(stack, kind)["full"]
    expected = found["padded"]
    assert len(expected["losses"]) == STEPS
    assert expected["models"] == (2 if kind in ("dpo", "kto") else 1)
    assert 0 < expected["no_grad"] < len(expected["calls"]), "evaluation"
    assert_packed(found["packed"], expected)
    for way in ("packed", "shared"):
        if way in found:
            assert_same(found[way], expected, but="logits/" if "zeroed" in found else "nothing")
    if "zeroed" in found:
        assert_same(found["packed"], found["zeroed"])
    if "shared" in found:
        assert_shared(found["shared"], found["packed"])


def assert_as_padded(stack: str, kind: str, variant: str, models: int) -> None:
    # ``models`` is the number of models in the padded run.
    found = runs(stack, kind)[variant]
    assert found["padded"]["models"] == models
    assert_packed(found["packed"], found["padded"])
    assert_same(found["packed"], found["padded"], but="logits/" if (stack, kind) in OF_PADDING else "nothing")


@pytest.mark.parametrize(("stack", "kind"), PAIRS)
def test_trainer_with_an_adapter(stack: str, kind: str) -> None:
    # Where there is a reference, it is the model without its adapter.
    assert_as_padded(stack, kind, "lora", models=1)


@pytest.mark.parametrize("stack", [OLD, OLDER, NEWEST])
@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_precomputed_log_probabilities_of_the_reference(stack: str, kind: str) -> None:
    # They are computed in the loader up to 0.19, and in the trainer's constructor since 1.0: packed in both.
    assert_as_padded(stack, kind, "precompute", models=2)


@pytest.mark.parametrize("stack", [OLD, OLDER, NEWEST])
def test_dpo_with_the_mean_log_probabilities_of_ipo(stack: str) -> None:
    found = runs(stack, "dpo")["ipo"]
    assert_packed(found["packed"], found["padded"])
    assert_same(found["packed"], found["padded"])


@pytest.mark.parametrize(("stack", "kind"), GROUPS)
def test_reinforcement_learning_has_the_losses_and_metrics_of_padded_batches(stack: str, kind: str) -> None:
    # Old log-probabilities, those of the reference, and the reward model's batches are packed too.
    found = runs(stack, kind)["reward_model"]
    assert len(found["padded"]["losses"]) >= STEPS
    assert found["padded"]["models"] == 3
    assert_groups(found)


@pytest.mark.parametrize(("stack", "kind"), [group for group in GROUPS if group not in OF_TWO_POLICIES])
@pytest.mark.parametrize(("variant", "models"), [("lora", 1), ("checkpointing", 2)])
def test_reinforcement_learning_with_an_adapter_or_checkpointing(
    stack: str, kind: str, variant: str, models: int
) -> None:
    # The policy generates with a cache, and those calls are not packed.
    found = runs(stack, kind)[variant]
    assert found["padded"]["cached"]
    assert found["padded"]["models"] == models
    assert [bool(run["again"]) for run in found.values()] == [variant == "checkpointing"] * 3
    assert_groups(found)


def assert_groups(found: dict[str, Any]) -> None:
    expected = found["padded"]
    assert 0 < expected["no_grad"] < len(expected["calls"])
    assert_packed(found["packed"], expected)
    assert_shared(found["shared"], found["packed"])
    for way in ("packed", "shared"):
        assert_same(found[way], expected)


def test_dpo_with_ligers_loss() -> None:
    # With ``use_liger_loss``, all ``logits/...`` count padding.
    found = runs("liger-trl-0.19.1", "dpo")["liger"]
    assert_packed(found["packed"], found["padded"])
    assert_same(found["packed"], found["padded"], but="logits/")


BOUNDARIES = {"position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
OWN = [(OLDER, "padding_free"), (OLDER, "ffd"), (NEWEST, "padding_free"), (NEWEST, "bfd"), (NEWEST, "bfd_split")]


@functools.cache
def own_rows(stack: str, option: str) -> dict[str, Any]:
    return run_in(stack, SCRIPTS / "trl_sft.py", option)


@pytest.mark.parametrize(("stack", "option"), OWN)
def test_rows_that_sft_packs_itself_are_trained_as_their_documents_padded(stack: str, option: str) -> None:
    # Documents are those of TRL's dataset: ``bfd`` drops what is longer than a row, ``bfd_split`` cuts it.
    found = own_rows(stack, option)
    assert {*found["columns"]} & BOUNDARIES == (BOUNDARIES if stack == NEWEST else {"position_ids"})
    isolated, mixed = found["alone"]
    assert isolated < 1e-5 < 0.01 < mixed
    assert len(found["losses"]["padded"]) == STEPS
    assert found["losses"]["packed"] == pytest.approx(found["losses"]["padded"], rel=1e-5)
    assert "padding_free=True" in found["refused"]
    if option == "bfd_split":
        assert sum(found["documents"]) > sum(own_rows(stack, "bfd")["documents"])
        assert len(found["documents"]) > len(own_rows(stack, "bfd")["documents"]) == 300


@pytest.mark.parametrize("stack", [OLDER, NEWEST])
def test_rows_of_the_wrapped_strategy_are_refused_or_said(stack: str) -> None:
    # Such rows say nowhere where texts start, so ``apply`` can only warn that nothing was packed.
    found = own_rows(stack, "wrapped")
    assert not {*found["columns"]} & BOUNDARIES
    assert "NothingPacked" in found["said"]
    assert "packing_strategy='wrapped'" in found["refused"]


IN_PASSES = [
    *[(stack, "sft", "full") for stack in (OLDER, NEWEST)],
    *[(stack, "dpo", variant) for stack in (OLD, OLDER, NEWEST) for variant in ("full", "ipo", "lora", "precompute")],
    *[(NEWEST, "dpo", loss) for loss in ("aot", "aot_unpaired", "hinge", "robust", "bco_pair", "sppo_hard")],
    *[(stack, kind, "full") for stack in (OLD, OLDER, NEWEST) for kind in ("kto", "orpo", "cpo", "reward")],
    (OLDER, "prm", "full"),
    *[(stack, "grpo", variant) for stack in (OLDER, NEWEST) for variant in ("grpo", "bnpo", "dr_grpo")],
    (NEWEST, "grpo", "dapo"),
    (NEWEST, "rloo", "function"),
]
OF_PASSES = ("passes_per_batch", "tokens_per_second", "padding_avoided")


@functools.cache
def in_passes(stack: str, kind: str) -> dict[str, Any]:
    variants = [variant for where, what, variant in IN_PASSES if (where, what) == (stack, kind)]
    script = "trl_groups.py" if kind in ("grpo", "rloo") else "trl_pairs.py"
    ways = ",".join(("padded", *budgets(kind)))
    return run_in(stack, SCRIPTS / script, kind, *[f"{variant}:{STEPS}:{ways}" for variant in variants])


def budgets(kind: str) -> tuple[str, ...]:
    # The smaller budget is about half a batch.
    return ("budget150", "budget90") if kind == "sft" else ("budget250", "budget160")


@pytest.mark.parametrize(("stack", "kind", "variant"), IN_PASSES)
def test_a_budget_of_tokens_keeps_losses_and_metrics(stack: str, kind: str, variant: str) -> None:
    # The loss sees the outputs of the whole batch, and so do metrics: all are those of the padded batch.
    found = in_passes(stack, kind)[variant]
    expected = by_name({**found["padded"], "losses": []})
    cut = []
    for budget in budgets(kind):
        ours = by_name({**found[budget], "losses": []})
        cut.append(sum(ours["passes_per_batch"]))
        assert expected.keys() == ours.keys() - set(OF_PASSES)
        for name in expected.keys() - {"losses"}:
            if (stack, kind) in OF_PADDING and "logits/" in name:
                continue
            size = max(map(abs, expected[name]))
            assert ours[name] == pytest.approx(expected[name], rel=0, abs=1e-4 * size + 1e-6), (name, budget)
    assert cut[1] > cut[0] >= len(expected["loss"]) and cut[1] > 1.2 * len(expected["loss"])
