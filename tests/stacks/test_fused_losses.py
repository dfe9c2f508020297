"""Liger's, cut-cross-entropy's and TRL's fused losses are right on packed rows, or refused by name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from replaced_forwards import LOSS_ALONE, cases, judged
from stage import largest_relative_difference, losses_of, rows, tiny_llama

import fa2patch

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("trains_with_liger.py")
STEPS = 3
# Relative bound on each step's loss. First labels are one in fifty and change a mean over all labels by less than a
# thousandth.
BOUND = 2e-5


@pytest.fixture
def held(finding):
    # Each of the recorded cases must be right or refused.

    def held(cases):
        finding["cases"] = cases
        wrong = {case: said for case, said in cases.items() if said != "right" and not said.startswith("refused")}
        assert cases and not wrong

    return held


PACKAGES = {
    "liger_on_the_class": "liger_kernel",
    "liger_on_the_object": "liger_kernel",
    "cut_cross_entropy": "cut_cross_entropy",
    "trl_fused_head": "trl",  # SFTTrainer applies ``add_fused_lm_head`` to every model
}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_step(name, held):
    pytest.importorskip(PACKAGES[name])
    held(cases(name))


def padded(features):
    # Every token is a label, although nothing predicts a row's first.
    return rows([{**one, "labels": one["input_ids"]} for one in features])


def packed(features):
    # The patch has to ignore the documents' first labels.
    ids = [torch.tensor(one["input_ids"]) for one in features]
    row = torch.cat(ids)[None]
    return {"input_ids": row, "labels": row, "position_ids": torch.cat([torch.arange(len(one)) for one in ids])[None]}


def trained(stage, patched, collate, **options):
    # The model is patched before or after Trainer is made, or not at all.
    model = tiny_llama()
    if patched == "before Trainer":
        fa2patch.apply(model)
    # otherwise Trainer counts labels before the forward, first labels included, padded and packed
    trainer = stage.trainer(model, collate, max_steps=STEPS, average_tokens_across_devices=False, **options)
    trainer.model_accepts_loss_kwargs = False
    if patched == "after Trainer":
        fa2patch.apply(trainer.model)
    try:
        trainer.train()
        return losses_of(trainer)
    finally:
        fa2patch.revert(trainer.model)


def off(right):
    # ``judged`` calls the result.

    def said(losses):
        apart = largest_relative_difference(losses, right)
        return "" if apart < BOUND else f"losses off by {apart:.0e}: {losses[0]:.4f} for {right[0]:.4f}"

    return said


def in_both_orders(stage, **options):
    wrong = off(trained(stage, "", padded))
    return {
        f"patched {order}": judged(lambda: trained(stage, order, packed, **options), wrong)  # noqa: B023
        for order in ("before Trainer", "after Trainer")
    }


def test_trainer_with_liger(stage, held):
    pytest.importorskip("liger_kernel")
    held(in_both_orders(stage, use_liger_kernel=True, liger_kernel_config=LOSS_ALONE))


def test_sft_with_its_fused_head(stage, held):
    if not stage.trl:
        pytest.skip("no TRL here")
    held(in_both_orders(stage))


def test_run_with_liger(stage, held, tmp_path):
    # ``fa2patch run --collate`` must reproduce the losses of the script that trains with Liger, or refuse.
    pytest.importorskip("liger_kernel")
    tiny_llama().save_pretrained(tmp_path)
    stage.tokenizer.save_pretrained(tmp_path)
    examples = [one["input_ids"][:24] for one in stage.examples(stage.train[:64])]
    (tmp_path / "documents.json").write_text(json.dumps(examples), encoding="utf-8")
    held({name: ran(tmp_path, name) for name in ("LlamaForCausalLM", "MyModel")})


def ran(folder, name):
    right, error = started([], folder, name)
    assert right is not None, f"the script fails without fa2patch: {error[-2000:]}"
    losses, error = started(["-m", "fa2patch", "run", "--collate"], folder, name)
    if losses is not None:
        said = judged(lambda: losses, off(right))
        told = "fa2patch: Trainer trains padded" in error
        return "refused: it says that it trains padded" if told and said == "right" else said
    refused = next((known for known in vars(fa2patch.errors) if f"{known}:" in error), None)
    assert refused is not None, f"looked for an error of fa2patch's, found {error[-2000:]}"
    return f"refused: {refused}"


def started(before, folder, name):
    # The losses are in the last line of the script's output, or None if it failed.
    command = [sys.executable, *before, str(SCRIPT), str(folder), name]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TMPDIR": str(folder)})
    return None if done.returncode else json.loads(done.stdout.splitlines()[-1]), done.stderr
