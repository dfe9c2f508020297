"""Classifiers on packed rows give one vector per document, or one label per token, as in padded training."""

from __future__ import annotations

import copy
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from classification_cases import DOCUMENTS, KINDS, assert_same, build, documents, packed, padded, run, sequences, tokens

import fa2patch
from compat_matrix import environments

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gemma2"])
def test_sequences(family: str, kind: str) -> None:
    sequences(family, kind)


@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon"])
def test_tokens(family: str) -> None:
    # Falcon's forward takes position_ids and does not pass them on.
    tokens(family)


@pytest.fixture
def llama() -> Any:
    return build("llama", "SequenceClassification", num_labels=2)


@pytest.fixture
def expected(llama: Any) -> Any:
    # Padded training gives this.
    return run(llama, padded(DOCUMENTS, KINDS["classes"]))


@pytest.fixture
def batch() -> dict[str, Any]:
    return packed(DOCUMENTS, KINDS["classes"])


def test_nothing_crosses(llama: Any, batch: Any) -> None:
    fa2patch.apply(llama)
    before = llama(**batch).logits
    embeddings = llama.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
    call = {**batch, "input_ids": None, "inputs_embeds": embeddings}
    (gradient,) = torch.autograd.grad(llama(**call).logits[2].sum(), embeddings)
    inside = torch.zeros(18, dtype=torch.bool)
    inside[6:15] = True
    assert (gradient[0, inside].abs().amax(dim=-1) > 0).all()
    assert gradient[0, ~inside].abs().max() == 0
    batch["input_ids"][0, 7] += 1
    after = llama(**batch).logits
    assert torch.equal(after[[0, 1, 3]], before[[0, 1, 3]])
    assert not torch.equal(after[2], before[2])


def test_several_rows_and_labels_in_a_row(llama: Any, expected: Any, batch: Any) -> None:
    fa2patch.apply(llama)
    rows = [packed(DOCUMENTS[:2] + documents(3), [0, 0, 0]), packed(DOCUMENTS[2:3], [0])]
    both = {name: torch.cat([row[name] for row in rows]) for name in ("input_ids", "position_ids")}
    alone = padded(DOCUMENTS[:2] + documents(3) + DOCUMENTS[2:3], [0])
    assert torch.allclose(llama(**both).logits, llama(**{**alone, "labels": None}).logits, atol=1e-4)
    batch["labels"] = batch["labels"][None]
    assert_same(run(llama, batch), expected)


def test_embeddings_in_place_of_ids(llama: Any, expected: Any, batch: Any) -> None:
    fa2patch.apply(llama)
    ids = batch.pop("input_ids")
    found = llama(inputs_embeds=llama.get_input_embeddings()(ids), **batch)
    assert torch.allclose(found.logits, expected[0], atol=1e-4)
    assert torch.allclose(found.loss, expected[1], atol=1e-5)


def test_tuples_hidden_states_and_checkpointing(llama: Any, expected: Any, batch: Any) -> None:
    fa2patch.apply(llama)
    loss, logits, *_ = llama(**batch, return_dict=False)
    assert torch.allclose(logits, expected[0], atol=1e-4)
    assert torch.allclose(loss, expected[1], atol=1e-5)
    assert llama(**batch, output_hidden_states=True).hidden_states[0].shape[:2] == (1, 18)
    llama.gradient_checkpointing_enable({"use_reentrant": False})
    llama.train()
    assert_same(run(llama, batch), expected)


def test_a_copy_and_a_reverted_one(llama: Any, batch: Any) -> None:
    untouched = copy.deepcopy(llama)
    fa2patch.apply(llama)
    copied = copy.deepcopy(llama)
    assert torch.equal(copied(**batch).logits, llama(**batch).logits)
    fa2patch.revert(llama)
    del batch["labels"]
    assert torch.equal(llama(**batch).logits, untouched(**batch).logits)
    assert llama(**batch).logits.shape == (1, 2)


def test_through_super(llama: Any, expected: Any, batch: Any) -> None:
    # The derived class calls its base class's forward, and a model of the base class is patched too.

    class DerivedForSequenceClassification(type(llama)):  # type: ignore[misc]
        def forward(self, input_ids=None, attention_mask=None, position_ids=None, labels=None, **kwargs):  # type: ignore[no-untyped-def]
            return super().forward(
                input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, labels=labels, **kwargs
            )

    derived = DerivedForSequenceClassification(llama.config).eval()
    derived.load_state_dict(llama.state_dict())
    fa2patch.apply(llama)
    fa2patch.apply(derived)
    assert_same(run(derived, batch), expected)


def test_a_hook_that_expects_whole_rows_is_named(llama: Any, batch: Any) -> None:
    # ms-swift's hook gives each document a padded row of its own, in the place of the head's pooling.

    def by_document(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        lengths = [5, 1, 9, 3]
        output["last_hidden_state"] = torch.nn.utils.rnn.pad_sequence(output[0].squeeze(0).split(lengths), True)
        return output

    llama.model.register_forward_hook(by_document, with_kwargs=True)
    fa2patch.apply(llama, prove=False)
    with pytest.raises(
        fa2patch.errors.PackingNotIsolated, match="by_document, a forward hook on its LlamaModel.*padded"
    ):
        llama(**batch)


def test_trainer_trains_evaluates_and_predicts(llama: Any, tmp_path: Path) -> None:
    examples = [{"input_ids": doc.tolist(), "label": int(doc[0]) % 2} for doc in documents(5, 1, 9, 3, 7, 2, 4, 6)]

    def pad(features: list[dict[str, Any]]) -> dict[str, Any]:
        docs = [torch.tensor(feature["input_ids"]) for feature in features]
        return padded(docs, [feature["label"] for feature in features])

    found = {}
    for name, collate in (
        ("padded", pad),
        ("packed", fa2patch.DataCollatorWithFlattening(document_labels=True, return_flash_attn_kwargs=True)),
    ):
        model = copy.deepcopy(llama)
        if name == "packed":
            fa2patch.apply(model)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=4, per_device_eval_batch_size=4, max_steps=6,
            gradient_accumulation_steps=2, learning_rate=1e-3, logging_steps=1, save_strategy="no", report_to=[],
            use_cpu=True, seed=0, disable_tqdm=True, remove_unused_columns=False,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model, arguments, train_dataset=examples, eval_dataset=examples, data_collator=collate
        )
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        predicted = trainer.predict(examples)
        found[name] = losses, trainer.evaluate()["eval_loss"], predicted.predictions, predicted.label_ids
    for ours, theirs in zip(found["packed"], found["padded"]):
        assert torch.tensor(ours).shape == torch.tensor(theirs).shape
        assert torch.allclose(torch.tensor(ours), torch.tensor(theirs), rtol=1e-4, atol=1e-4)
    assert len(found["packed"][0]) == 6
    assert found["packed"][2].shape == (8, 2)


def test_compiled(llama: Any, expected: Any) -> None:
    fa2patch.apply(llama)
    compiled = torch.compile(llama, backend="aot_eager")
    for options in ({}, {"return_flash_attn_kwargs": True}):
        assert_same(run(compiled._orig_mod, packed(DOCUMENTS, KINDS["classes"], **options)), expected)
        output = compiled(**packed(DOCUMENTS, KINDS["classes"], **options))
        assert torch.allclose(output.logits, expected[0], atol=1e-4)
        assert torch.allclose(output.loss, expected[1], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("release", ["4.36.2", "4.40.2", "4.44.2", "4.48.3", "4.52.4", "4.57.6", "5.0.0", "newest"])
def test_other_releases(release: str) -> None:
    wanted = environments.version(release)
    python = environments.make(wanted, ROOT / ".compat")
    with environments.only_our_packages() as packages:
        variables = {**os.environ, "PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1"}
        script = [str(python), str(ROOT / "tests/helpers/classification_cases.py")]
        done = subprocess.run(script, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["transformers"] == wanted.transformers
    assert len(found["held"]) >= 20
