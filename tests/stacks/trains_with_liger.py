"""An ordinary script that fine-tunes with Liger's fused loss and pads: ``trains_with_liger.py FOLDER CLASS``.

``CLASS`` is LlamaForCausalLM or MyModel. Transformers does not know the name MyModel. For such a class Trainer divides
the loss by all labels, including each document's first, as every Trainer up to 5.9 does, and so does ``--collate``.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, LlamaForCausalLM, Trainer, TrainingArguments


class MyModel(LlamaForCausalLM):
    pass


class Documents(torch.utils.data.Dataset):
    # Every token is a label.

    def __init__(self, documents):
        self.documents = documents

    def __len__(self):
        return len(self.documents)

    def __getitem__(self, at):
        ids = self.documents[at]
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids}


def main(folder, name):
    data = Documents(json.loads(Path(folder, "documents.json").read_text(encoding="utf-8")))
    collator = DataCollatorForSeq2Seq(AutoTokenizer.from_pretrained(folder), padding=True)
    model = {"MyModel": MyModel}.get(name, LlamaForCausalLM).from_pretrained(folder)
    arguments = TrainingArguments(
        output_dir=str(Path(folder, "out")), per_device_train_batch_size=8, max_steps=3, logging_steps=1,
        learning_rate=1e-3, lr_scheduler_type="constant", save_strategy="no", report_to="none", use_cpu=True, seed=0,
        disable_tqdm=True, remove_unused_columns=False, use_liger_kernel=True,
        liger_kernel_config={"rope": False, "rms_norm": False, "swiglu": False},
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data, data_collator=collator)
    trainer.train()
    print(json.dumps([entry["loss"] for entry in trainer.state.log_history if "loss" in entry]))


if __name__ == "__main__":
    main(*sys.argv[1:])
