"""An ordinary script that fine-tunes with Liger's fused loss and pads: ``trains_with_liger.py FOLDER CLASS``.

``CLASS`` is LlamaForCausalLM or MyModel. Of a class whose name Transformers does not know, Trainer divides the loss by
all labels, each document's first among them, as every Trainer up to 5.9 does; and ``--collate`` with it.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, Trainer, TrainingArguments


class MyModel(LlamaForCausalLM):
    pass


def pad(features):
    ids = [torch.tensor(one["input_ids"]) for one in features]
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad(ids, batch_first=True),
        "labels": pad(ids, batch_first=True, padding_value=-100),
        "attention_mask": pad([torch.ones_like(one) for one in ids], batch_first=True),
    }


def main(folder, name):
    examples = [{"input_ids": ids} for ids in json.loads(Path(folder, "documents.json").read_text(encoding="utf-8"))]
    model = {"MyModel": MyModel}.get(name, LlamaForCausalLM).from_pretrained(folder)
    arguments = TrainingArguments(
        output_dir=str(Path(folder, "out")), per_device_train_batch_size=8, max_steps=3, logging_steps=1,
        learning_rate=1e-3, lr_scheduler_type="constant", save_strategy="no", report_to="none", use_cpu=True, seed=0,
        disable_tqdm=True, remove_unused_columns=False, use_liger_kernel=True,
        liger_kernel_config={"rope": False, "rms_norm": False, "swiglu": False},
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=examples, data_collator=pad)
    trainer.train()
    print(json.dumps([entry["loss"] for entry in trainer.state.log_history if "loss" in entry]))


if __name__ == "__main__":
    main(*sys.argv[1:])
