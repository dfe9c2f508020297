"""Train with the installed TRL on fixed texts: ``trl_pairs.py KIND VARIANT:STEPS:WAY,WAY...``.

The kind is sft, dpo, kto, orpo, cpo, reward or prm. Run by test_trl.py, with the arguments of ``trl_noting.run``.
Variants are ``full``, names of losses, and

- ``lora``: the reference is the model without its adapter.
- ``precompute``: the reference's log-probabilities are computed before the training.
- ``liger``: Liger computes the loss from hidden states; in newer releases it replaces layers instead.
"""

from __future__ import annotations

from typing import Any

import datasets
import peft
import torch
import transformers
from trl_noting import config, in_way, liger, model, run, text, tokenizer, trl_class

NAMES = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "orpo": "ORPO", "cpo": "CPO", "reward": "Reward", "prm": "PRM"}
HEADS = {"reward": transformers.LlamaForSequenceClassification, "prm": transformers.LlamaForTokenClassification}


def examples(kind: str, number: int, seed: int) -> datasets.Dataset:
    generator = torch.Generator().manual_seed(seed)
    rows: list[dict[str, Any]] = []
    for at in range(number):
        prompt, chosen, rejected = (text(generator, longest) for longest in (60, 24, 8))
        if kind == "sft":
            rows.append({"prompt": prompt, "completion": " " + chosen})
        elif kind == "kto":
            rows.append({"prompt": prompt, "completion": " " + chosen, "label": at % 3 > 0})
        elif kind == "reward":
            rows.append({"chosen": f"{prompt} {chosen}", "rejected": f"{prompt} {rejected}"})
        elif kind == "prm":
            rows.append({"prompt": prompt, "completions": [chosen, rejected], "labels": [at % 2 > 0, at % 3 > 0]})
        else:
            rows.append({"prompt": prompt, "chosen": " " + chosen, "rejected": " " + rejected})
    return datasets.Dataset.from_list(rows)


def make(kind: str, variant: str, steps: int, how: str, generated: list[Any]) -> Any:
    words = tokenizer()
    name = NAMES[kind]
    losses = {} if variant in ("full", "lora", "precompute", "liger") else {"loss_type": variant}
    args = config(
        f"{name}Config",
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        max_steps=steps,
        learning_rate=2e-2 if variant == "lora" else 2e-3,
        adam_epsilon=1e-5,
        eval_strategy="steps",
        eval_steps=10,
        max_length=128,
        max_prompt_length=64,
        precompute_ref_log_probs=variant == "precompute",
        **(liger(f"{name}Config") if variant == "liger" else {}),
        **losses,
    )
    head = HEADS.get(kind, transformers.LlamaForCausalLM)
    labels = {"reward": {"num_labels": 1}, "prm": {"num_labels": 2}}.get(kind, {})
    given: dict[str, Any] = {}
    if variant == "lora":
        task = {"reward": "SEQ_CLS", "prm": "TOKEN_CLS"}.get(kind, "CAUSAL_LM")
        targets = ["q_proj", "v_proj", "up_proj"]
        given["peft_config"] = peft.LoraConfig(r=4, target_modules=targets, task_type=task, lora_dropout=0.0)
    policy = model(0, len(words), head, **labels)
    if kind in ("dpo", "kto") and variant != "lora":
        given["ref_model"] = model(1, len(words))
    return in_way(trl_class(f"{name}Trainer"), how)(
        model=policy, args=args, train_dataset=examples(kind, 40, 0), eval_dataset=examples(kind, 8, 1),
        processing_class=words, **given,
    )  # fmt: skip


if __name__ == "__main__":
    run(make)
