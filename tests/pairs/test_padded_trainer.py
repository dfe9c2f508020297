"""Seq2SeqTrainer with padded batches that are computed packed, at once or in passes. In float64, rounding is small."""

from __future__ import annotations

import pytest
from pairs import built
from trained_pairs import STEPS, examples, losses, padded
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

import fa2patch

WAYS = {
    "padded_batches": ({"padded_batches": True}, None),
    "padded_batches in passes": ({"padded_batches": True, "max_tokens": 16}, None),
    "packed_trainer": (None, {}),
    "packed_trainer in passes": (None, {"max_tokens": 16}),
}


def trained(family, way, folder, **options):
    model = built(family).double().train()
    applied, packed = WAYS[way] if way else (None, None)
    if applied is not None:
        fa2patch.apply(model, prove=False, **applied)
    trainer = Seq2SeqTrainer if packed is None else fa2patch.packed_trainer(Seq2SeqTrainer, **packed)
    return losses(model, padded(model), folder, trainer=trainer, **options), model


def tokens_of(model):
    return [stack.tally.tokens for stack in fa2patch.status(model).stacks]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"label_smoothing_factor": 0.1}, {"gradient_accumulation_steps": 2}], ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_fifty_steps(family, way, options, tmp_path):
    before, _ = trained(family, None, tmp_path / "padded", **options)
    after, model = trained(family, way, tmp_path / "packed", **options)
    assert len(after) == len(before) == STEPS // options.get("gradient_accumulation_steps", 1)
    assert after == pytest.approx(before, rel=1e-5)
    real = [sum(len(each[name]) for each in examples()) for name in ("input_ids", "labels")]
    sources, targets = tokens_of(model)
    assert sources == real[0]
    if "label_smoothing_factor" in options:  # it takes the labels out, and nothing else says where targets end
        assert targets == 0 or targets > real[1]
    else:
        assert targets == real[1]


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_an_unchanged_script_with_upstreams_collator(family, tmp_path):
    # predict_with_generate and evaluation are as before
    found = []
    for padded_batches in (None, True):
        model = built(family).double().train()
        if padded_batches:
            fa2patch.apply(model, padded_batches=True, prove=False)
        arguments = Seq2SeqTrainingArguments(
            output_dir=str(tmp_path), max_steps=3, logging_steps=1, per_device_train_batch_size=4, report_to=[],
            save_strategy="no", use_cpu=True, predict_with_generate=True, generation_max_length=8, disable_tqdm=True,
        )  # fmt: skip
        data = examples()[:12]
        trainer = Seq2SeqTrainer(model, arguments, train_dataset=data, data_collator=Collated(model))
        trainer.train()
        predicted = trainer.predict(data[:4])
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found.append((losses, predicted.predictions.tolist(), predicted.metrics["test_loss"]))
    before, after = found
    assert after[0] == pytest.approx(before[0], rel=1e-5) and len(after[0]) == 3
    assert after[1] == before[1]
    assert after[2] == pytest.approx(before[2], rel=1e-5)
    assert all(tokens_of(model))


class Tokenizer:
    padding_side, model_input_names, deprecation_warnings = "right", ["input_ids", "attention_mask"], {}

    def __init__(self, padding):
        self.pad_token_id = padding

    def pad(self, features, **options):
        from transformers import BatchEncoding

        longest = max(len(each["input_ids"]) for each in features)
        rows = {"input_ids": self.pad_token_id, "attention_mask": 0}
        batch = {name: [list(each.get(name, [1] * len(each["input_ids"]))) for each in features] for name in rows}
        padded = {name: [row + [value] * (longest - len(row)) for row in batch[name]] for name, value in rows.items()}
        others = {name: [each[name] for each in features] for name in features[0] if name not in rows}
        return BatchEncoding({**padded, **others}, tensor_type=options.get("return_tensors"))


def Collated(model):
    return DataCollatorForSeq2Seq(Tokenizer(model.config.pad_token_id), model=model)


@pytest.mark.parametrize("family", ["t5", "t5gemma"])
def test_passes_of_two_stacks_are_computed_with_the_loss_of_the_batch(family, tmp_path):
    # T5Gemma takes the number of labels in a step, as a loss does whose passes would be computed once
    found = []
    for base in (Seq2SeqTrainer, fa2patch.packed_trainer(Seq2SeqTrainer, max_tokens=16)):
        model = built(family).train()  # in float64, masks of T5Gemma's padded batches give NaN
        arguments = Seq2SeqTrainingArguments(
            output_dir=str(tmp_path), max_steps=2, logging_steps=1, per_device_train_batch_size=4, report_to=[],
            save_strategy="no", use_cpu=True, disable_tqdm=True, gradient_accumulation_steps=2,
        )  # fmt: skip
        trainer = base(model, arguments, train_dataset=examples()[:16], data_collator=Collated(model))
        trainer.train()
        found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert found[1] == pytest.approx(found[0], rel=1e-4) and len(found[0]) == 2
    assert "passes_per_batch" in trainer.state.log_history[0] and trainer.token_budget.why_exact
