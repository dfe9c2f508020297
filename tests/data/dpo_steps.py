"""Train ten DPO steps with the installed TRL: ``dpo_steps.py padded|packed|padding_free [sigmoid|ipo|lora]``.

Run by test_preference.py. With ``lora`` the loss is ``sigmoid``, and the reference is the model without its adapter.

Prints a JSON object with the losses and the number of tokens that the first layer computed in each forward.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import tempfile

import datasets
import peft
import tokenizers
import torch
import transformers
import trl

import fa2patch
from fa2patch.preference import trainer_class

WORDS = sorted(set((argparse.__doc__ or "").split()))
STEPS = 10


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def pairs(number: int) -> datasets.Dataset:
    generator = torch.Generator().manual_seed(0)

    def text(longest: int) -> str:
        length = int(torch.randint(1, longest, (1,), generator=generator))
        return " ".join(WORDS[at] for at in torch.randint(len(WORDS), (length,), generator=generator).tolist())

    rows = [{"prompt": text(20), "chosen": " " + text(30), "rejected": " " + text(8)} for _ in range(number)]
    return datasets.Dataset.from_list(rows)


def model(seed: int, vocabulary: int) -> transformers.PreTrainedModel:
    transformers.set_seed(seed)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.2,
            pad_token_id=0,
        )
    )


def main(how: str, loss: str) -> None:
    words = tokenizer()
    wanted = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": 4,
        "max_steps": STEPS,
        "learning_rate": 2e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "max_length": 64,
        "max_prompt_length": None,
        "loss_type": "sigmoid" if loss == "lora" else loss,
        "padding_free": how == "padding_free",
    }
    known = inspect.signature(trl.DPOConfig).parameters
    config = trl.DPOConfig(**{name: value for name, value in wanted.items() if name in known})
    policy, reference = model(0, len(words)), model(0, len(words))
    adapter = {}
    if loss == "lora":
        names = ["q_proj", "v_proj", "up_proj"]
        adapter["peft_config"] = peft.LoraConfig(r=4, target_modules=names, task_type="CAUSAL_LM", lora_dropout=0.0)
    if how == "padding_free":
        fa2patch.apply(policy)
        fa2patch.apply(reference)
    cls = trainer_class() if how == "packed" else trl.DPOTrainer
    losses: list[float] = []

    class Noted(cls):  # logged losses are rounded
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            losses.append(float(loss.detach()))
            return loss

    trainer = Noted(
        model=policy,
        ref_model=None if adapter else reference,
        args=config,
        train_dataset=pairs(40),
        processing_class=words,
        **adapter,
    )
    computed: list[int] = []
    first = policy.model.layers[0]
    first.register_forward_pre_hook(
        lambda module, args, kwargs: computed.append((args[0] if args else kwargs["hidden_states"])[..., 0].numel()),
        with_kwargs=True,
    )
    trainer.train()
    print(json.dumps({"trl": trl.__version__, "losses": losses, "tokens": computed}))


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "sigmoid")
