"""Train GRPO or RLOO with the installed TRL: ``rl_steps.py grpo|rloo padded|packed|shared [full|lora|checkpointing]``.

Run by test_trainers.py. All prompts begin with the same system prompt, and there are two groups or more in each batch.
Old log-probabilities are computed in chunks of a device's batch, each batch is trained on twice, and the loss has a KL
term. With ``lora``, the reference is the model without its adapter. With ``lora`` and ``checkpointing``, the policy
samples the completions.

Prints a JSON object: the losses, the generated tokens, the logged metrics, and the number of tokens that the first
layer computed in each forward outside of generation.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

import datasets
import peft
import torch
import transformers
import trl
from dpo_steps import WORDS, Noting, model, tokenizer

from fa2patch.preference import trainer_class

GROUP, BATCH, ACCUMULATED, LONGEST = 4, 8, 2, 24
SYSTEM = " ".join((WORDS * 3)[:24])
COMMON = {
    "output_dir": tempfile.mkdtemp(),
    "per_device_train_batch_size": BATCH,
    "gradient_accumulation_steps": ACCUMULATED,
    "learning_rate": 2e-3,
    "lr_scheduler_type": "constant",
    "adam_epsilon": 1e-5,  # advantages cancel each other: 1e-8 makes steps of gradients that are only rounding
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "seed": 1,
}


def prompts(number: int) -> list[str]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(number):
        length = int(torch.randint(1, 30, (1,), generator=generator))
        words = torch.randint(len(WORDS), (length,), generator=generator).tolist()
        found.append(" ".join([SYSTEM, *(WORDS[at] for at in words)]))
    return found


def reward(completions: list[str], **others: Any) -> list[float]:
    """The share of words of an even number of letters, which differs between the completions of a group."""
    words = [text.split() for text in completions]
    return [sum(len(word) % 2 == 0 for word in each) / (len(each) + 1) for each in words]


def drawn(policy: Any, end: int) -> Any:
    """A ``generate`` that draws completions of different lengths, whatever the policy is.

    A sampled token depends on the rounding of its logits. After one such token two runs have nothing to do with each
    other: RLOO of 0.19.1, packed and padded, sampled the same tokens for 45 batches of 50.
    """
    generator = torch.Generator().manual_seed(0)

    def generate(input_ids: torch.Tensor, attention_mask: torch.Tensor, **others: Any) -> Any:
        found = torch.randint(3, policy.config.vocab_size, (len(input_ids), LONGEST), generator=generator)
        lengths = torch.randint(1, LONGEST + 8, (len(input_ids), 1), generator=generator)
        found = found.masked_fill(torch.arange(LONGEST) >= lengths, end)
        whole = torch.cat([input_ids, found], 1)
        if not others.get("return_dict_in_generate"):
            return whole
        mask = torch.cat([attention_mask.long(), torch.ones_like(found)], 1)
        with torch.no_grad():
            logits = policy(whole, attention_mask=mask, use_cache=True).logits[:, -LONGEST - 1 : -1]
        return SimpleNamespace(sequences=whole, scores=logits.unbind(1))

    return generate


def config(cls: Any, **wanted: Any) -> Any:
    known = inspect.signature(cls).parameters
    return cls(**{name: value for name, value in {**COMMON, **wanted}.items() if name in known})


def grouped(kind: str, base: Any, variant: str, steps: int, words: Any) -> Any:
    """GRPO, and RLOO in the form that it has since TRL 0.22: a sampler repeats the prompts."""
    adapter = {}
    if variant == "lora":
        names = ["q_proj", "v_proj", "up_proj"]
        adapter["peft_config"] = peft.LoraConfig(r=4, target_modules=names, task_type="CAUSAL_LM", lora_dropout=0.0)
    args = config(
        getattr(trl, f"{kind.upper()}Config"),
        max_steps=steps,
        num_generations=GROUP,
        num_iterations=2,
        beta=0.04,
        max_prompt_length=None,
        max_completion_length=LONGEST,
        temperature=1.0,
        gradient_checkpointing=variant == "checkpointing",
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )
    rows = datasets.Dataset.from_list([{"prompt": prompt} for prompt in prompts(40)])
    with tempfile.TemporaryDirectory() as folder:  # the reference is loaded by the model's name
        model(0, len(words)).save_pretrained(folder)
        policy = transformers.LlamaForCausalLM.from_pretrained(folder)
        if variant == "full":
            policy.generate = drawn(policy, words.eos_token_id)
        return base(policy, reward, args=args, train_dataset=rows, processing_class=words, **adapter)


def rloo_with_policies(base: Any, steps: int, words: Any) -> Any:
    """RLOO in the form that it has up to TRL 0.21: it is given two policies, and repeats each batch of prompts."""
    args = config(
        trl.RLOOConfig,
        rloo_k=GROUP,
        num_ppo_epochs=2,
        num_mini_batches=1,
        total_episodes=BATCH * ACCUMULATED * steps // 2,
        response_length=LONGEST,
        stop_token="eos",
        local_rollout_forward_batch_size=BATCH,
        kl_coef=0.04,
        num_sample_generations=0,
    )
    words.padding_side = "left"
    policy = model(0, len(words))
    policy.generate = drawn(policy, words.eos_token_id)
    rows = datasets.Dataset.from_list([{"input_ids": words(prompt)["input_ids"]} for prompt in prompts(40)])
    return base(
        config=args, processing_class=words, policy=policy, ref_policy=model(1, len(words)),
        reward_model=reward, train_dataset=rows,
    )  # fmt: skip


def main(kind: str, how: str, variant: str, steps: int) -> None:
    words = tokenizer()
    base = getattr(trl, f"{kind.upper()}Trainer")
    if how != "padded":
        base = trainer_class(base, share_prompts=how == "shared")
    if "rloo_k" in inspect.signature(getattr(trl, f"{kind.upper()}Config")).parameters:
        trainer = rloo_with_policies(base, steps, words)
    else:
        trainer = grouped(kind, base, variant, steps, words)
    noting = Noting(trainer)
    trainer.train()
    print(json.dumps(noting.found()))


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["grpo", "rloo"])
    parser.add_argument("how", choices=["padded", "packed", "shared"])
    parser.add_argument("variant", choices=["full", "lora", "checkpointing"], nargs="?", default="full")
    parser.add_argument("steps", type=int, nargs="?", default=50)
    main(**vars(parser.parse_args(sys.argv[1:])))
