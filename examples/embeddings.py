"""Train an embedding model with sentence-transformers, without padding: signatures find their docstrings.

pip install sentence-transformers datasets
python embeddings.py --model sentence-transformers/all-MiniLM-L6-v2
"""

from __future__ import annotations

import argparse
import tempfile

import small
from transformers import BertConfig, BertModel, set_seed

import fa2patch

try:
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        losses,
        models,
    )
except ImportError as error:
    raise SystemExit(f"{error}. This example needs: pip install sentence-transformers datasets") from None


def main(argv: list[str] | None = None) -> SentenceTransformerTrainer:
    """Train and return the trainer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="an embedding model in place of the tiny BERT")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (%(default)s)")
    parser.add_argument("--output", default="runs/example", help="where checkpoints go (%(default)s)")
    options = parser.parse_args(argv)
    texts = small.docstrings()
    set_seed(0)
    model = SentenceTransformer(options.model) if options.model else tiny_bert(texts)
    pairs = {"anchor": [text for text, _ in texts], "positive": [text for _, text in texts]}

    fa2patch.apply(model)  # training and encode now compute no padding

    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            output_dir=options.output,
            per_device_train_batch_size=16,
            max_steps=options.steps,
            learning_rate=2e-5 if options.model else 1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_dict(pairs),
        loss=losses.MultipleNegativesRankingLoss(model),
    )
    trainer.train()
    return trainer


def tiny_bert(texts: small.Texts) -> SentenceTransformer:
    """Build a BERT of two layers with random weights, and a tokenizer trained on the texts."""
    tokenizer = small.tiny_tokenizer(texts)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        BertModel(config).save_pretrained(folder)
        inner = models.Transformer(folder, max_seq_length=512)
    return SentenceTransformer(modules=[inner, models.Pooling(64)])


if __name__ == "__main__":
    main()
