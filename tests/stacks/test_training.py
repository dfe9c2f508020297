"""Packed training equals padded training, by Trainer or by SFTTrainer of the environment that this runs in.

``python -m compat_matrix.ecosystem`` runs this in the stacks of compat_matrix/ecosystem/stacks.toml, and keeps what the
tests put into ``finding``.
"""

import functools
from pathlib import Path

import pytest
import torch
from stage import (
    BATCH,
    IGNORED,
    LONGEST,
    Noted,
    compared,
    furthest,
    largest_relative_difference,
    losses_of,
    packed,
    packed_in_two_rows,
    padded,
    tiny_llama,
    tokens,
    weights,
)  # fmt: skip

import fa2patch

# Relative difference of the loss at every step, in float32. Rounding in the logs (four digits) is a fiftieth of it.
BOUND = 1e-3

# Relative to the largest weight, after a few steps of Adam in which sums are taken in another order.
SAME = 1e-4


def assert_same(found):
    assert found["largest_relative_difference"] < BOUND and found.get("weights_off_by", 0) < SAME, found


def curve(stage, steps):
    # Training is padded, packed in one row and in two, with and without fa2patch.
    reference = stage.run(tiny_llama(), padded, patched=False, steps=steps)
    found = {"steps": steps, "bound": BOUND, "same_mini_batches": True}
    found.update(first_loss=reference["losses"][0], last_loss=reference["losses"][-1])
    for name, collate in (("packed", packed), ("two_rows", packed_in_two_rows)):
        for alone in ("", "_alone"):
            run = stage.run(tiny_llama(), collate, patched=not alone, steps=steps)
            found["same_mini_batches"] &= run["seen"] == reference["seen"]
            found[f"{name}{alone}"] = {**compared(run, reference), "last_loss": run["losses"][-1]}
    return found


def largest(found, *names):
    return max(found[name]["largest_relative_difference"] for name in names)


@pytest.mark.slow
def test_curve(stage, finding):
    # The control, packed training without fa2patch, must leak, or the curves would show nothing.
    finding.update(curve(stage, steps=200))
    assert finding["same_mini_batches"]
    assert largest(finding, "packed", "two_rows") < BOUND < largest(finding, "packed_alone", "two_rows_alone")


@pytest.mark.slow
def test_the_first_steps_of_the_curve(stage):
    found = curve(stage, steps=4)
    assert largest(found, "packed", "two_rows") < 5e-5 and found["same_mini_batches"]
    assert found["two_rows_alone"]["largest_relative_difference"] > 1e-2


@pytest.mark.slow
def test_the_curve_leaks_where_nothing_is_patched(stage, monkeypatch):
    monkeypatch.setattr(fa2patch, "apply", lambda model: None)
    found = curve(stage, steps=3)
    assert largest(found, "packed", "two_rows") > BOUND and found["same_mini_batches"]


@pytest.mark.slow
def test_accumulation(stage, finding, steps=10, every=4):
    # The first step's loss is a mean over tokens or over micro-batches. Single examples tell which of them it is.
    micro = []

    def noting(features):
        micro.append(tokens(features))
        return packed(features)

    options = {"steps": steps, "gradient_accumulation_steps": every}
    reference = stage.run(tiny_llama(), padded, patched=False, **options)
    run = stage.run(tiny_llama(), noting, patched=True, **options)
    first, means = run["losses"][0], means_of(micro[:every])
    nearest = min(means, key=lambda name: abs(means[name] - first))
    finding.update(**options, **compared(run, reference), first_loss=first, means=means, loss_is_a_mean_over=nearest)
    assert_same(finding)
    assert abs(means[nearest] - first) < 1e-3 * first and run["seen"] == reference["seen"]


@torch.no_grad()
def means_of(batches):
    # Returned are the untrained model's loss per token and the mean of the batches' means, from single examples.
    model = tiny_llama().eval()
    sums, counts = [], []
    for batch in batches:
        losses = []
        for example in batch:
            ids = torch.tensor([example["input_ids"]])
            logits = model(input_ids=ids).logits[0, :-1]
            losses.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none"))
        together = torch.cat(losses)
        sums.append(float(together.sum()))
        counts.append(together.numel())
    means = [total / count for total, count in zip(sums, counts)]
    return {"tokens": sum(sums) / sum(counts), "micro-batches": sum(means) / len(means)}


@pytest.mark.slow
def test_checkpointing(stage, finding, steps=10):
    reference = stage.run(tiny_llama(), packed, patched=True, steps=steps, gradient_checkpointing=False)
    finding["steps"] = steps
    for name, reentrant in (("reentrant", True), ("not_reentrant", False)):
        kwargs = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
        run = stage.run(tiny_llama(), packed, patched=True, steps=steps, **kwargs)
        on = any(getattr(module, "gradient_checkpointing", False) for module in run["model"].modules())
        finding[name] = {**compared(run, reference), "was_on": on}
        assert_same(finding[name])
        assert on


@pytest.mark.slow
def test_lengths(stage, finding, steps=10):
    # Llama's own forward up to 4.44 does not take the collator's lengths and ``seq_idx``.
    with_lengths = functools.partial(packed, return_flash_attn_kwargs=True, return_seq_idx=True)
    reference = stage.run(tiny_llama(), padded, patched=False, steps=steps)
    run = stage.run(tiny_llama(), with_lengths, patched=True, steps=steps)
    finding.update(steps=steps, **compared(run, reference))
    try:
        alone = stage.run(tiny_llama(), with_lengths, patched=False, steps=steps)
        finding["alone"] = compared(alone, reference)
    except TypeError as error:
        finding["alone"] = {"refused": str(error).splitlines()[0]}
    assert finding["largest_relative_difference"] < BOUND and "cu_seq_lens_q" in run["batch"]


def test_counting(stage, finding):
    # Upstream's padding collator leaves each row's first token as a label. A padded loss that is divided by the number
    # of labels is then smaller by exactly these labels. In packed training the loss is divided by the tokens trained
    # on, in every version.
    from transformers import DataCollatorForLanguageModeling

    collate, features = DataCollatorForLanguageModeling(stage.tokenizer, mlm=False), []

    def upstream(given):
        features.append(tokens(given))
        return collate([{"input_ids": one["input_ids"]} for one in given])

    reference = stage.run(tiny_llama(), upstream, patched=False, steps=1)
    run = stage.run(tiny_llama(), packed, patched=True, steps=1)
    trained, first = sum(len(one["input_ids"]) - 1 for one in features[0]), len(features[0])
    ratio = reference["losses"][0] / run["losses"][0]
    finding.update(padded_by_packed=ratio, tokens_trained_on=trained, first_labels=first)
    assert min(abs(ratio - 1), abs(ratio - trained / (trained + first))) < 1e-4


def test_verified(stage, finding):
    # The batch is one of the trainer's loader. ``verify`` runs before and after training, and on an unpatched model.
    model = tiny_llama()
    fa2patch.apply(model)
    trainer = stage.trainer(model, packed, max_steps=2)
    batch = next(iter(trainer.get_train_dataloader()))
    found = [fa2patch.verify(trainer.model, batch=batch, max_documents=3)]
    trainer.train()
    found.append(fa2patch.verify(trainer.model, batch=batch, max_documents=3))
    alone = fa2patch.verify(tiny_llama(), batch=batch, max_documents=3, strict=False)
    finding["documents"] = len(found[0].documents)
    finding["alone"] = "isolated" if alone.ok else alone.reason
    assert all(one.ok and one.patched for one in found)


@pytest.mark.slow
def test_streaming(stage, finding, steps=10):
    # The length of a ``datasets`` stream is unknown.
    datasets = pytest.importorskip("datasets", reason="no datasets in this stack")
    # already tokenized, because TRL before 0.12 tokenizes no stream
    features = datasets.Features({"input_ids": datasets.Sequence(datasets.Value("int64"))})

    def stream():
        yield from stage.examples(stage.train)

    def made():
        return datasets.IterableDataset.from_generator(stream, features=features)

    reference = stage.run(tiny_llama(), padded, patched=False, steps=steps, train_dataset=made())
    run = stage.run(tiny_llama(), packed, patched=True, steps=steps, train_dataset=made())
    finding.update(steps=steps, longest=LONGEST, **compared(run, reference))
    assert finding["largest_relative_difference"] < BOUND and run["seen"] == reference["seen"]


@pytest.mark.slow
def test_evaluation(stage, finding, steps=6):
    # Packed training is evaluated padded and packed at every second step.

    def held_out(patched, collate, evaluate):
        model = tiny_llama()
        if patched:
            fa2patch.apply(model)
        options = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": steps, "held_out": True}
        trainer = stage.trainer(model, Noted(collate), kind=evaluating(stage, evaluate), **options)
        trainer.train()
        losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        assert len(losses) == steps // 2
        return losses

    reference = held_out(False, padded, padded)
    curves = [held_out(True, packed, evaluate) for evaluate in (padded, packed)]
    finding["largest_relative_difference"] = max(largest_relative_difference(one, reference) for one in curves)
    finding.update(steps=steps, held_out=len(stage.held_out))
    assert finding["largest_relative_difference"] < BOUND


def evaluating(stage, collate):
    # Evaluation gets a separate collator.
    if stage.trl:
        from trl import SFTTrainer as Base
    else:
        from transformers import Trainer as Base

    class Evaluating(Base):
        def get_eval_dataloader(self, eval_dataset=None):
            training, self.data_collator = self.data_collator, collate
            try:
                return super().get_eval_dataloader(eval_dataset)
            finally:
                self.data_collator = training

    return Evaluating


def test_predict(stage, finding):
    # The logits of every held-out token are compared, document by document.
    model = tiny_llama()
    reference = stage.trainer(model, padded, held_out=True, max_steps=1)
    lengths = [len(example["input_ids"]) for example in reference.eval_dataset]  # TRL may have added end tokens
    logits = torch.tensor(first(reference.predict(reference.eval_dataset).predictions))
    fa2patch.apply(model)
    trainer = stage.trainer(model, packed, held_out=True, max_steps=1)
    by_batch = trainer.predict(trainer.eval_dataset)
    off, documents = 0.0, 0
    for row, start in enumerate(range(0, len(lengths), BATCH)):
        at = 0
        for length in lengths[start : start + BATCH]:
            found = torch.tensor(first(by_batch.predictions)[row, at : at + length])
            off = max(off, float((found - logits[documents, :length]).abs().max() / logits.abs().max()))
            assert by_batch.label_ids[row, at] == IGNORED
            at, documents = at + length, documents + 1
    finding["logits_off_by"] = off
    assert off < 1e-4 and documents == len(stage.held_out)


def first(predictions):
    return predictions[0] if isinstance(predictions, tuple) else predictions


def test_resume(stage, finding, steps=8):
    # The weights must be equal bit for bit. A new trainer and model start from the checkpoint at half.
    saved = {"save_strategy": "steps", "save_steps": steps // 2}
    whole = stage.run(tiny_llama(), packed, patched=True, steps=steps, **saved)
    checkpoint = Path(whole["trainer"].args.output_dir) / f"checkpoint-{steps // 2}"
    model = tiny_llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # a weight that the checkpoint does not restore stays zero
    fa2patch.apply(model)
    trainer = stage.trainer(model, Noted(packed), max_steps=steps, **saved)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    finding.update(steps=steps, resumed_at=steps // 2, weights_off_by=furthest(weights(model), weights(whole["model"])))
    assert finding["weights_off_by"] == 0 and losses_of(trainer) == whole["losses"]
    assert "fa2patch" not in (checkpoint / "config.json").read_text(encoding="utf-8")
