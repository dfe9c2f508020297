"""Seq2SeqTrainer: fifty steps of packed pairs have the losses of padded batches. In float64, rounding is small."""

from __future__ import annotations

import pytest
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
