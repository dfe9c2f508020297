"""Classifiers, padded and packed: the cases of test_classification.py, for this and other versions of Transformers.
As a script it runs the named families, or all of ``FAMILIES`` that this Transformers has, and prints a JSON object.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import transformers

import fa2patch
from compat_matrix import tiny_models

# Relative to the largest value compared, in float32; for gradients, to the largest of all gradients.
TOLERANCE = 1e-5

FAMILIES = ("llama", "gpt2", "mistral", "mixtral", "opt", "phi", "falcon", "gpt_neox", "gpt_bigcode", "qwen2", "gemma2")

KINDS = {
    "classes": [1, 0, 1, 1],
    "number": [0.5, -1.0, 2.0, 0.0],
    "several": [[1.0, 0, 1], [0.0, 1, 1], [0.0, 0, 0], [1.0, 1, 0]],
}
LABELS = {"classes": 2, "number": 1, "several": 3}


def documents(*lengths: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 60, (length,), generator=generator) for length in lengths]


DOCUMENTS = documents(5, 1, 9, 3)


def build(family: str, task: str, **config: Any) -> Any:
    # The weights are scaled up. The model is eager where there is no sdpa, or where sdpa has no softcap.
    settings = tiny_models.config_of(family)
    without = {"pad_token_id": 0, "classifier_dropout": 0.0, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    for name, value in {**without, **config}.items():
        setattr(settings, name, value)
    cls = class_of(family, task)
    sdpa = getattr(cls, "_supports_sdpa", False) and family != "gemma2"
    model = tiny_models._load(cls, settings, "sdpa" if sdpa else "eager").float()
    tiny_models.scale_up(model)
    return model.eval()


def padded(docs: list[torch.Tensor], labels: Any, per_token: bool = False, left: bool = False) -> dict[str, Any]:
    # There is a label for each document, or for each token.
    length = max(map(len, docs))
    batch = {name: torch.zeros(len(docs), length, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    batch["labels"] = torch.full((len(docs), length), -100) if per_token else torch.tensor(labels)
    for row, doc in enumerate(docs):
        at = slice(length - len(doc), None) if left else slice(len(doc))
        batch["input_ids"][row, at], batch["attention_mask"][row, at] = doc, 1
        if per_token:
            batch["labels"][row, at] = torch.tensor(labels[row])
    return batch


def packed(docs: list[torch.Tensor], labels: Any, **options: Any) -> dict[str, Any]:
    collate = fa2patch.DataCollatorWithFlattening(document_labels=True, **options)
    return collate([{"input_ids": doc, "labels": label} for doc, label in zip(docs, labels)])


def run(model: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    output = model(**batch)
    output.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return output.logits.detach(), output.loss.detach(), gradients


def assert_same(ours: Any, theirs: Any) -> None:
    for found, expected in zip(ours[:2], theirs[:2]):
        assert found.shape == expected.shape
        assert (found - expected).abs().max() <= TOLERANCE * max(float(expected.abs().max()), 1.0)
    assert ours[2].keys() == theirs[2].keys()
    scale = max(float(gradient.abs().max()) for gradient in theirs[2].values())
    for name, expected in theirs[2].items():
        assert (ours[2][name] - expected).abs().max() <= TOLERANCE * scale, name


OPTIONS = [{}, {"return_flash_attn_kwargs": True}, {"return_seq_idx": True}, {"pad_to_multiple_of": 8}]


def class_of(family: str, task: str) -> Any:
    # ``task`` is SequenceClassification or TokenClassification.
    stem = tiny_models.model_class(family).__name__.replace("LMHeadModel", "For").replace("ForCausalLM", "For")
    return getattr(transformers, stem + task, None)


def sequences(family: str, kind: str) -> None:
    # Padded batches are compared before and after ``apply``, too.
    model = build(family, "SequenceClassification", num_labels=LABELS[kind])
    expected = run(model, padded(DOCUMENTS, KINDS[kind]))
    dense = model(**padded(DOCUMENTS, KINDS[kind]))
    fa2patch.apply(model)
    for options in OPTIONS:
        assert_same(run(model, packed(DOCUMENTS, KINDS[kind], **options)), expected)
    again = model(**padded(DOCUMENTS, KINDS[kind]))
    assert torch.equal(again.logits, dense.logits)
    assert torch.equal(again.loss, dense.loss)


def tokens(family: str) -> None:
    model = build(family, "TokenClassification", num_labels=3)
    labels = [[int(token) % 3 for token in doc] for doc in DOCUMENTS]
    logits, loss, gradients = run(model, padded(DOCUMENTS, labels, per_token=True))
    logits = torch.cat([row[: len(doc)] for row, doc in zip(logits, DOCUMENTS)])[None]
    fa2patch.apply(model)
    features = [{"input_ids": doc, "labels": label} for doc, label in zip(DOCUMENTS, labels)]
    batch = fa2patch.DataCollatorWithFlattening(separator_id=None)(features)
    assert batch["labels"][0, 0] == labels[0][0]
    assert_same(run(model, batch), (logits, loss, gradients))


def main(families: list[str]) -> None:
    held = []
    for family in families or FAMILIES:
        if not tiny_models.is_present(family):
            continue
        for task in ("SequenceClassification", "TokenClassification"):
            if class_of(family, task) is None:
                continue
            for kind in KINDS if task == "SequenceClassification" else ["tokens"]:
                try:
                    sequences(family, kind) if kind in KINDS else tokens(family)
                except Exception as error:
                    raise AssertionError(f"{family} {task} {kind}") from error
                held.append(f"{family} {kind}")
    print(json.dumps({"transformers": transformers.__version__, "held": held}))


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    main(sys.argv[1:])
