"""Seq2SeqTrainer: fifty steps of packed pairs have the losses of padded batches. In float64, rounding is small."""

from __future__ import annotations

import pytest
import torch
from pairs import built
from trained_pairs import STEPS, losses, padded

import fa2patch


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"label_smoothing_factor": 0.1}, {"gradient_accumulation_steps": 2}, {"gradient_checkpointing": True}],
    ids=str,
)
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_fifty_steps(family, options, tmp_path):
    if options.get("gradient_checkpointing"):
        options = {**options, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    model = built(family).double().train()
    before = losses(model, padded(model), tmp_path / "padded", **options)
    model = built(family).double().train()
    fa2patch.apply(model)
    after = losses(model, fa2patch.DataCollatorForSeq2Seq(model=model), tmp_path / "packed", **options)
    assert len(after) == len(before) == STEPS // options.get("gradient_accumulation_steps", 1)
    assert after == pytest.approx(before, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_fifty_steps_of_lora(family, tmp_path):
    peft = pytest.importorskip("peft")
    names = ["q", "v"] if family == "t5" else ["q_proj", "v_proj"]
    found = {}
    for way in ("padded", "packed"):
        config = peft.LoraConfig(target_modules=names, task_type="SEQ_2_SEQ_LM")
        model = peft.get_peft_model(built(family), config).double().train()
        if way == "packed":
            fa2patch.apply(model)
        collate = padded(model) if way == "padded" else fa2patch.DataCollatorForSeq2Seq(model=model)
        found[way] = losses(model, collate, tmp_path / way)
    assert len(found["packed"]) == STEPS and found["packed"][-1] != found["packed"][0]
    assert found["packed"] == pytest.approx(found["padded"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_fifty_steps_in_bfloat16_are_as_near_to_float32_as_padded_ones(family, tmp_path):
    found = {}
    for way in ("exact", "padded", "packed"):
        model = built(family).train()
        if way == "packed":
            fa2patch.apply(model)
        collate = fa2patch.DataCollatorForSeq2Seq(model=model) if way == "packed" else padded(model)
        found[way] = torch.tensor(losses(model, collate, tmp_path / way, bf16=way != "exact"))
    off = {way: ((found[way] - found["exact"]).abs() / found["exact"]).mean().item() for way in found}
    assert off["padded"] > 0  # rounded
    assert off["packed"] < 1.5 * off["padded"], off
