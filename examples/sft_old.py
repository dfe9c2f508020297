"""Fine-tune with TRL's SFTTrainer, without padding. For TRL 0.7 to 0.11; sft.py is for later versions.

pip install 'trl<0.12'
python sft_old.py --model NAME --data FILE.jsonl
"""

from __future__ import annotations

import small
from transformers import TrainingArguments

import fa2patch

try:
    from datasets import Dataset
    from trl import SFTTrainer
except ImportError as error:
    raise SystemExit(f"{error}. This example needs TRL 0.7 to 0.11: pip install 'trl<0.12'") from None


def main(argv: list[str] | None = None) -> SFTTrainer:
    """Train and return the trainer."""
    options = small.options(__doc__, argv)
    texts = small.texts(options)
    model, tokenizer = small.load(options, texts)
    dataset = Dataset.from_list([{"text": prompt + completion} for prompt, completion in texts])

    fa2patch.apply(model)  # works with any attn_implementation

    trainer = SFTTrainer(
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
        train_dataset=dataset,
        dataset_text_field="text",
        max_seq_length=512,
        tokenizer=tokenizer,
        data_collator=fa2patch.DataCollatorWithFlattening(),
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
