"""Training with sentence-transformers, unpatched and patched: ``st_training.py FAMILY KIND...``.

The last line is a JSON object. For each kind it holds the losses of all steps, the largest difference of the first
step's gradients and of the trained model's results, and the number of tokens that were computed, of both runs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable

import datasets
import sentence_transformers
import torch
from sentence_transformers import (
    CrossEncoder,
    InputExample,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
)
from st_folders import folder_of, sentence_transformer, texts, tokens_of
from torch.utils.data import DataLoader
from transformers import TrainerCallback

import fa2patch

STEPS, ROWS = 30, 8
PAIRS = list(zip(texts(40, seed=1), texts(40, seed=2)))
SCORES = torch.rand(40, generator=torch.Generator().manual_seed(3)).tolist()
LOSSES: dict[str, Callable[[Any], Any]] = {
    "multiple negatives": losses.MultipleNegativesRankingLoss,
    "cosine": losses.CosineSimilarityLoss,
    "cached": lambda model: losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=3),
    "matryoshka": lambda model: losses.MatryoshkaLoss(
        model, losses.MultipleNegativesRankingLoss(model), matryoshka_dims=[32, 16, 8]
    ),
}


class Notes(TrainerCallback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        if "loss" in logs:
            self.losses.append(logs["loss"])


def trained(trainer: Any, settings: Any, model: Any, loss: Any, scored: bool, home: str) -> list[float]:
    columns = {"one": [one for one, _ in PAIRS], "other": [other for _, other in PAIRS]}
    if scored:
        columns["label"] = SCORES  # type: ignore[assignment]
    notes = Notes()
    arguments = settings(
        home, max_steps=STEPS, per_device_train_batch_size=ROWS, learning_rate=1e-4, logging_steps=1, report_to="none",
        save_strategy="no", use_cpu=True, seed=5, disable_tqdm=True,
    )  # fmt: skip
    trainer(
        model=model, args=arguments, train_dataset=datasets.Dataset.from_dict(columns), loss=loss, callbacks=[notes]
    ).train()
    return notes.losses


def gradients(model: Any, loss: Any) -> list[torch.Tensor]:
    # One batch, without a Trainer.
    read = getattr(model, "preprocess", None) or model.tokenize
    batch = [read([pair[at] for pair in PAIRS[:ROWS]]) for at in (0, 1)]
    loss(batch, torch.tensor(SCORES[:ROWS])).backward()
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return found


def sentence(kind: str, folder: str, patched: bool, home: str) -> dict[str, Any]:
    model = sentence_transformer(folder)
    if patched:
        fa2patch.apply(model)
    seen = tokens_of(model)
    loss = LOSSES.get(kind, losses.CosineSimilarityLoss)(model)
    first = gradients(model, loss)
    if kind == "fit":
        examples = [InputExample(texts=list(pair), label=score) for pair, score in zip(PAIRS, SCORES)]
        data = DataLoader(examples, batch_size=ROWS)
        model.fit([(data, loss)], epochs=6, warmup_steps=0, optimizer_params={"lr": 1e-4}, show_progress_bar=False)
        of_steps = []
    else:
        of_steps = trained(
            SentenceTransformerTrainer, SentenceTransformerTrainingArguments, model, loss, kind == "cosine", home
        )
    tokens = sum(seen)
    return {
        "losses": of_steps,
        "gradients": first,
        "tokens": tokens,
        "results": [model.encode(texts(), convert_to_tensor=True)],
    }


def cross(kind: str, folder: str, patched: bool, home: str) -> dict[str, Any]:
    torch.manual_seed(4)  # its head is new
    model = CrossEncoder(folder, num_labels=1, device="cpu", max_length=64)
    with torch.no_grad():
        for name, parameter in model.model.named_parameters():
            if "pooler" in name or "classifier" in name:
                parameter.mul_(15)  # scores of new weights are almost equal
    if patched:
        fa2patch.apply(model)
    seen = tokens_of(model.model)
    if kind == "cross encoder, fit":
        examples = [InputExample(texts=list(pair), label=score) for pair, score in zip(PAIRS, SCORES)]
        data = DataLoader(examples, batch_size=ROWS)
        model.fit(data, epochs=6, warmup_steps=0, optimizer_params={"lr": 1e-4}, show_progress_bar=False)
        of_steps = []
    else:
        from sentence_transformers.cross_encoder import CrossEncoderTrainer, CrossEncoderTrainingArguments
        from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss

        loss = BinaryCrossEntropyLoss(model)
        of_steps = trained(CrossEncoderTrainer, CrossEncoderTrainingArguments, model, loss, True, home)
    tokens = sum(seen)
    return {"losses": of_steps, "gradients": [], "tokens": tokens, "results": [torch.tensor(model.predict(PAIRS))]}


def sparse(kind: str, folder: str, patched: bool, home: str) -> dict[str, Any]:
    from sentence_transformers import SparseEncoder, SparseEncoderTrainer, SparseEncoderTrainingArguments
    from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss, SpladeLoss

    model = SparseEncoder(folder, device="cpu")
    if patched:
        fa2patch.apply(model)
    seen = tokens_of(model)
    loss = SpladeLoss(
        model,
        SparseMultipleNegativesRankingLoss(model),
        document_regularizer_weight=3e-5,
        query_regularizer_weight=5e-5,
    )
    of_steps = trained(SparseEncoderTrainer, SparseEncoderTrainingArguments, model, loss, False, home)
    tokens = sum(seen)
    found = model.encode(texts(), convert_to_tensor=True, convert_to_sparse_tensor=False)
    return {"losses": of_steps, "gradients": [], "tokens": tokens, "results": [found]}


def run(kind: str, folder: str, patched: bool, home: str) -> dict[str, Any]:
    torch.manual_seed(0)
    made = {"cross": cross, "sparse": sparse}.get(kind.split()[0], sentence)
    return made(kind, folder, patched, home)


def off(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    # The difference is a part of the largest value.
    assert len(found) == len(expected)
    assert all(float(each.max() - each.min()) > 0.1 * float(each.abs().max()) for each in expected)
    scale = max((float(each.abs().max()) for each in expected), default=1.0)
    return max((float((a - b).abs().max()) for a, b in zip(found, expected)), default=0.0) / scale


def main(family: str, *kinds: str) -> None:
    result: dict[str, Any] = {"version": sentence_transformers.__version__}
    with tempfile.TemporaryDirectory() as home:
        folder = folder_of(family, Path(home))
        for kind in kinds:
            expected, found = (run(kind, folder, patched, home) for patched in (False, True))
            result[kind] = {
                "losses": [found["losses"], expected["losses"]],
                "tokens": [found["tokens"], expected["tokens"]],
                "gradients": off(found["gradients"], expected["gradients"]),
                "compared": len(expected["gradients"]),
                "results": off(found["results"], expected["results"]),
            }
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
