"""Fine-tune LoRA adapters with PEFT and transformers.Trainer, without padding.

pip install peft
python peft_lora.py --model NAME --data FILE.jsonl
"""

from __future__ import annotations

import small
from transformers import Trainer, TrainingArguments

import fa2patch

try:
    import peft
except ImportError as error:
    raise SystemExit(f"{error}. This example needs PEFT: pip install peft") from None


def main(argv: list[str] | None = None) -> Trainer:
    """Train the adapters and return the trainer."""
    options = small.options(__doc__, argv)
    texts = small.texts(options)
    model, tokenizer = small.load(options, texts)
    lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, lora)

    fa2patch.apply(model)  # PEFT's model, or the base model before get_peft_model

    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=options.output,
            per_device_train_batch_size=8,
            max_steps=options.steps,
            learning_rate=2e-4 if options.model else 1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=small.tokenized(texts, tokenizer),
        data_collator=fa2patch.DataCollatorWithFlattening(),
    )
    trainer.train()
    model.save_pretrained(options.output)  # the adapters, as without fa2patch
    return trainer


if __name__ == "__main__":
    main()
