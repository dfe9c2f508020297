"""An ordinary fine-tuning script with a Trainer, without fa2patch: ``python train.py FOLDER pad|pack OUTPUT``.
FOLDER holds a model and documents. Mini-batches are padded by the collator or packed into one row.
"""

import json
import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments


class Documents(torch.utils.data.Dataset):
    def __init__(self, texts):
        self.texts = texts

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, at):
        ids = self.texts[at]
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids}


def packed(features):
    # The row has position_ids that restart and a mask of ones.
    row = {
        "input_ids": sum((feature["input_ids"] for feature in features), []),
        "labels": sum(([-100, *feature["labels"][1:]] for feature in features), []),
        "position_ids": [position for feature in features for position in range(len(feature["input_ids"]))],
    }
    row["attention_mask"] = [1] * len(row["input_ids"])
    return {name: torch.tensor([values]) for name, values in row.items()}


def main(folder, layout, output):
    texts = json.loads((Path(folder) / "documents.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    arguments = TrainingArguments(
        output_dir=output,
        per_device_train_batch_size=4,
        max_steps=4,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
        remove_unused_columns=False,
        use_cpu=True,
        ddp_backend="gloo" if "RANK" in os.environ else None,
    )
    collator = packed if layout == "pack" else DataCollatorForSeq2Seq(tokenizer, padding=True)
    data = {"train_dataset": Documents(texts), "eval_dataset": Documents(texts[:4])}
    trainer = Trainer(model, arguments, **data, data_collator=collator)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    found = {"losses": losses, "steps": trainer.state.global_step}
    found["eval_loss"] = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        (Path(output) / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
