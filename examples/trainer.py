"""Fine-tune with transformers.Trainer, without padding.

    python trainer.py --model NAME --data FILE.jsonl

On several GPUs start it with `torchrun --nproc-per-node N`. Otherwise the Trainer splits batches by rows among the
GPUs, and a packed batch has one row.
"""

from __future__ import annotations

import small
from transformers import Trainer, TrainingArguments

import fa2patch


def main(argv: list[str] | None = None) -> Trainer:
    """Train and return the trainer."""
    options = small.options(__doc__, argv)
    texts = small.texts(options)
    model, tokenizer = small.load(options, texts)

    fa2patch.apply(model)  # in place

    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=options.output,
            per_device_train_batch_size=8,
            max_steps=options.steps,
            learning_rate=2e-5 if options.model else 2e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=small.tokenized(texts, tokenizer),
        data_collator=fa2patch.DataCollatorWithFlattening(),  # instead of a padding collator
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
