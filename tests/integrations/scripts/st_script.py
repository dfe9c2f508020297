"""An ordinary script of sentence-transformers, without fa2patch: ``st_script.py``. It encodes, trains and scores pairs.

Prints a JSON object: embeddings before and after training, the losses, the scores of a CrossEncoder, and the number of
tokens that the last layer computed in all.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import datasets
import torch
from sentence_transformers import (
    CrossEncoder,
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
)
from st_folders import folder_of, texts, tokens_of


def main(home: str) -> None:
    folder = folder_of("bert", Path(home))
    model = SentenceTransformer(folder, device="cpu")
    seen = tokens_of(model)
    before = model.encode(texts()).tolist()
    args = SentenceTransformerTrainingArguments(
        home, max_steps=6, per_device_train_batch_size=8, learning_rate=1e-4, logging_steps=1, report_to="none",
        save_strategy="no", use_cpu=True, seed=5, disable_tqdm=True,
    )  # fmt: skip
    columns = {"one": texts(40, seed=1), "other": texts(40, seed=2)}
    trainer = SentenceTransformerTrainer(
        model, args, datasets.Dataset.from_dict(columns), loss=losses.MultipleNegativesRankingLoss(model)
    )
    trainer.train()
    torch.manual_seed(4)  # the head of the CrossEncoder is new
    cross = CrossEncoder(folder, num_labels=1, device="cpu", max_length=64)
    pairs = list(zip(columns["one"], columns["other"]))
    cross.predict(pairs[:4])
    read = tokens_of(cross.model)  # a patched model may be proven on its first packed batch, which computes it again
    scores = cross.predict(pairs).tolist()
    print(json.dumps({
        "before": before, "after": model.encode(texts()).tolist(), "scores": scores,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "tokens": [sum(seen), sum(read)], "fa2patch": "fa2patch" in sys.modules,
    }))  # fmt: skip


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(temporary)
