"""``fa2patch run`` starts unchanged scripts, none of which imports fa2patch, in the stacks' environments."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from in_stack import printed_in

SCRIPTS = Path(__file__).with_name("scripts")
RUN = ("-m", "fa2patch", "run")

pytestmark = pytest.mark.slow


@functools.cache
def script(stack: str, name: str, *arguments: str, options: tuple[str, ...] | None = None) -> Any:
    # Without ``options``, the script runs without fa2patch. Returned are its result and the lines of fa2patch.
    how = () if options is None else (*RUN, *options)
    found, said = printed_in(stack, *how, str(SCRIPTS / name), *arguments, packages=["click"])
    assert found.pop("fa2patch") is (options is not None)
    return found, said


TIMED = ("step_time", "epoch")


def assert_same_logs(found: list[dict[str, Any]], expected: list[dict[str, Any]], but: str = "nothing") -> None:
    # Each value may differ by a part of the largest one of its kind.
    assert [entry.keys() for entry in found] == [entry.keys() for entry in expected]
    for name in (name for name in expected[0].keys() - {*TIMED} if but not in name):
        ours, theirs = ([entry[name] for entry in logs] for logs in (found, expected))
        assert ours == pytest.approx(theirs, rel=0, abs=1e-4 * max(map(abs, theirs)) + 1e-9), name


@pytest.mark.parametrize("stack", ["trl-0.19.1", "trl-1.16.0"])
def test_an_unchanged_grpo_script_logs_the_same_numbers_with_fewer_tokens_in_its_layers(stack: str) -> None:
    expected, _ = script(stack, "grpo.py")
    assert len({entry["loss"] for entry in expected["logs"]}) == len(expected["logs"]) == 4
    found, said = script(stack, "grpo.py", options=())
    assert_same_logs(found["logs"], expected["logs"])
    assert len(found["tokens"]) == len(expected["tokens"])
    assert sum(found["tokens"]) < 0.6 * sum(expected["tokens"])
    *patched, packs, last = said
    assert all("LlamaForCausalLM patched" in line for line in patched)
    assert "GRPOTrainer computes padded batches packed" in packs and "model, ref_model." in packs
    assert "LlamaForCausalLM computed " in last and last.endswith("padded batches.")


SCRIPTS_OF_TRL = [
    *[("trl-0.19.1", name) for name in ("sft", "dpo", "kto")],  # its grpo.py fails without a reward model of its own
    *[("trl-1.16.0", name) for name in ("sft", "dpo", "kto", "reward", "grpo", "rloo")],
]


# Numbers that are no results: sums over padding, and a loss of advantages that cancel each other but for rounding.
OTHERWISE = {("trl-0.19.1", "kto"): "logits/", ("trl-1.16.0", "rloo"): "loss"}


@pytest.mark.parametrize(("stack", "name"), SCRIPTS_OF_TRL)
def test_trls_own_scripts_log_the_same_numbers_with_fewer_tokens(stack: str, name: str) -> None:
    expected, _ = script(stack, "trls_own.py", name)
    assert len({entry["loss"] for entry in expected["logs"]}) == len(expected["logs"]) == 4
    found, said = script(stack, "trls_own.py", name, options=())
    assert_same_logs(found["logs"], expected["logs"], OTHERWISE.get((stack, name), "nothing"))
    assert all("grad_norm" in entry for entry in found["logs"])
    assert found["tokens"] < expected["tokens"]
    assert "Trainer computes padded batches packed" in said[-2]
    assert " computed " in said[-1] and said[-1].endswith("padded batches.")


def test_rows_that_trls_own_script_packs_are_said() -> None:
    found, said = script("trl-1.16.0", "trls_own.py", "packed", options=())
    assert len(found["logs"]) == 4
    assert said[-1] == "fa2patch: LlamaForCausalLM computed packed rows, each document by itself."


def test_no_pack_leaves_the_batches_of_an_unchanged_grpo_script_padded() -> None:
    expected, _ = script("trl-1.16.0", "grpo.py")
    found, said = script("trl-1.16.0", "grpo.py", options=("--no-pack",))
    assert_same_logs(found["logs"], expected["logs"])
    assert found["tokens"] == expected["tokens"]
    assert all("LlamaForCausalLM patched" in line for line in said[:-1]) and len(said) == 3
    assert "nothing was packed" in said[-1]


@pytest.mark.parametrize("stack", ["transformers-4.36.2", "transformers-4.57.6", "transformers-5.23.0"])
def test_an_unchanged_script_with_model_init_is_isolated(stack: str) -> None:
    # ``model_init`` calls the model's class in the Trainer's constructor, and again in each ``train``.
    alone, _ = script(stack, "model_init.py", "padded", "packed")
    padded, leaking = alone["padded"], alone["packed"]
    assert padded["losses"][:4] == padded["losses"][4:] and len(set(padded["losses"][:4])) == 4
    assert max(abs(one - other) for one, other in zip(leaking["losses"], padded["losses"])) > 0.1
    found, said = script(stack, "model_init.py", "packed", options=())
    assert found["packed"]["losses"] == pytest.approx(padded["losses"], rel=1e-4)
    assert found["packed"]["eval_loss"] == pytest.approx(padded["eval_loss"], rel=1e-4)
    assert len(said) == 4 and all("LlamaForCausalLM patched: 2 attention layers" in line for line in said[:-1])
    assert said[-1] == "fa2patch: LlamaForCausalLM computed packed rows, each document by itself."


@pytest.mark.parametrize("stack", ["sentence-transformers-3.0.1", "sentence-transformers-6.2.0"])
def test_an_unchanged_sentence_transformers_script_gets_the_same_numbers_with_fewer_tokens(stack: str) -> None:
    expected, _ = script(stack, "st_script.py")
    found, said = script(stack, "st_script.py", options=())
    for name in ("before", "after"):
        for ours, theirs in zip(found[name], expected[name]):
            assert ours == pytest.approx(theirs, rel=0, abs=1e-5 * max(map(abs, theirs)))
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4) and len(set(expected["losses"])) == 6
    assert found["scores"] == pytest.approx(expected["scores"], rel=1e-4)
    assert all(ours < 0.9 * theirs for ours, theirs in zip(found["tokens"], expected["tokens"]))
    *patched, last = said
    assert [line.split()[1] for line in patched] == ["BertForMaskedLM", "SentenceTransformer", "CrossEncoder"]
    assert all(line.endswith("packed, too.") for line in patched[1:])  # the first one is saved
    assert last.startswith("fa2patch: CrossEncoder and SentenceTransformer computed ")
