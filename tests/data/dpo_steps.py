"""Train DPO with the installed TRL: ``dpo_steps.py padded|packed|shared|padding_free [sigmoid|ipo|lora] [STEPS]``.

Run by test_trainers.py. With ``lora`` the loss is ``sigmoid``, and the reference is the model without its adapter.

Prints a JSON object with the losses, the logged metrics and the number of tokens that the first layer computed in each
forward.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import tempfile
from typing import Any

import datasets
import peft
import tokenizers
import torch
import transformers
import trl

import fa2patch
from fa2patch.preference import trainer_class

WORDS = sorted(set((argparse.__doc__ or "").split()))
TIMES = ("runtime", "per_second", "step_time", "flos", "time", "num_tokens_per", "eps")
"""Parts of the names of metrics that are no results."""


class Noting:
    """Note what a trainer computes: the losses that it goes back from, unrounded, and the tokens of the first layer.

    ``again`` counts how often the first MLP is computed without a call of the base model, which is what checkpointing
    does.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._losses, self._computed, self._generated = trainer, [], [], []
        self._again = 0
        backward = trainer.accelerator.backward

        def noted(loss: torch.Tensor, **kwargs: Any) -> None:
            self._losses.append(float(loss.detach()))
            backward(loss, **kwargs)

        trainer.accelerator.backward = noted
        inner = trainer.accelerator.unwrap_model(trainer.model)
        for held in (inner, getattr(trainer, "ref_model", None), getattr(trainer, "ref_policy", None)):
            if held is not None:
                causal = next(m for m in held.modules() if isinstance(m, transformers.LlamaForCausalLM))
                causal.model.layers[0].register_forward_pre_hook(self._layer, with_kwargs=True)
                causal.model.register_forward_pre_hook(self._called)
                causal.model.layers[0].mlp.register_forward_pre_hook(self._computed_again)
                self._note_generation(causal)
        self._generating = False

    def _layer(self, module: Any, args: Any, kwargs: Any) -> None:
        if not self._generating:
            self._computed.append((args[0] if args else kwargs["hidden_states"])[..., 0].numel())

    def _called(self, *call: Any) -> None:
        self._again -= 1

    def _computed_again(self, *call: Any) -> None:
        self._again += 1

    def _note_generation(self, causal: Any) -> None:
        generate = causal.generate

        def noted(*args: Any, **kwargs: Any) -> Any:
            self._generating = True
            found = generate(*args, **kwargs)
            self._generating = False
            self._generated.append((found if isinstance(found, torch.Tensor) else found.sequences).tolist())
            return found

        causal.generate = noted

    def found(self) -> dict[str, Any]:
        logs = [
            {name: value for name, value in entry.items() if not any(part in name for part in TIMES)}
            for entry in self._trainer.state.log_history
        ]
        return {
            "trl": trl.__version__, "losses": self._losses, "tokens": self._computed, "generated": self._generated,
            "logs": logs, "again": self._again,
        }  # fmt: skip


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

    rows = [{"prompt": text(80), "chosen": " " + text(30), "rejected": " " + text(8)} for _ in range(number)]
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


def main(how: str, loss: str, steps: int) -> None:
    words = tokenizer()
    wanted = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": 4,
        "max_steps": steps,
        "learning_rate": 2e-2 if loss == "lora" else 2e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "max_length": 128,
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
    cls = trainer_class(share_prompts=how == "shared") if how in ("packed", "shared") else trl.DPOTrainer
    trainer = cls(
        model=policy,
        ref_model=None if adapter else reference,
        args=config,
        train_dataset=pairs(40),
        processing_class=words,
        **adapter,
    )
    noting = Noting(trainer)
    trainer.train()
    print(json.dumps(noting.found()))


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    parser = argparse.ArgumentParser()
    parser.add_argument("how", choices=["padded", "packed", "shared", "padding_free"])
    parser.add_argument("loss", choices=["sigmoid", "ipo", "lora"], nargs="?", default="sigmoid")
    parser.add_argument("steps", type=int, nargs="?", default=10)
    main(**vars(parser.parse_args(sys.argv[1:])))
