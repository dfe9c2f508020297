"""Train GRPO or RLOO with the installed TRL: ``trl_groups.py grpo|rloo VARIANT:STEPS:WAY,WAY...``.

Run by test_trl.py, with the arguments of ``trl_noting.run``. All prompts begin with the same system prompt, and there
are two groups or more in each batch. Old log-probabilities are computed in chunks of a device's batch, each batch is
trained on twice, and the loss has a KL term. Variants:

- ``function``: a function gives the rewards.
- ``reward_model``: a sequence classifier over padded batches gives the rewards, together with a function.
- ``lora``: the reference is the model without its adapter.
- ``checkpointing``: layers are computed again in the backward pass.
- ``grpo``, ``bnpo``, ``dr_grpo``, ``dapo``: losses of GRPO, means of other numbers each; a function gives the rewards.
- ``liger``: Liger computes the loss from hidden states; in newer releases it replaces layers instead.

With ``lora``, ``checkpointing`` and ``liger``, the policy samples the completions.
"""

from __future__ import annotations

import functools
import inspect
import tempfile
from types import SimpleNamespace
from typing import Any

import datasets
import peft
import torch
import transformers
from trl_noting import WORDS, config, in_way, liger, model, reward, run, text, tokenizer, trl_class

GROUP, BATCH, ACCUMULATED, LONGEST = 4, 8, 2, 24
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo")
SYSTEM = " ".join((WORDS * 3)[:24])
COMMON = {
    "per_device_train_batch_size": BATCH,
    "per_device_eval_batch_size": BATCH,
    "gradient_accumulation_steps": ACCUMULATED,
    "learning_rate": 2e-3,
    "adam_epsilon": 1e-5,  # advantages cancel each other: 1e-8 makes steps of gradients that are only rounding
    "seed": 1,
}


def prompts(number: int) -> list[str]:
    generator = torch.Generator().manual_seed(0)
    return [f"{SYSTEM} {text(generator, 30)}" for _ in range(number)]


def drawn(policy: Any, end: int) -> Any:
    # It draws completions of different lengths, whatever the policy is. A sampled token depends on the rounding of its
    # logits, and after one such token two runs have nothing to do with each other: RLOO of 0.19.1, packed and padded,
    # sampled the same tokens for 45 batches of 50.
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


def note_generation(policy: Any, generated: list[Any]) -> None:
    generate = policy.generate

    @functools.wraps(generate)
    def noted(*args: Any, **kwargs: Any) -> Any:
        found = generate(*args, **kwargs)
        generated.append((found if isinstance(found, torch.Tensor) else found.sequences).tolist())
        return found

    policy.generate = noted


def classifier(words: Any) -> Any:
    found = model(2, len(words), transformers.LlamaForSequenceClassification, num_labels=1)
    found.config._name_or_path = "a/classifier"
    return found


def grouped(kind: str, base: Any, variant: str, steps: int, words: Any, generated: list[Any]) -> Any:
    # GRPO, and RLOO in the form that it has since TRL 0.22: a sampler repeats the prompts.
    given: dict[str, Any] = {}
    if variant == "lora":
        names = ["q_proj", "v_proj", "up_proj"]
        given["peft_config"] = peft.LoraConfig(r=4, target_modules=names, task_type="CAUSAL_LM", lora_dropout=0.0)
    args = config(
        f"{kind.upper()}Config",
        **COMMON,
        max_steps=steps,
        num_generations=GROUP,
        num_iterations=2,
        beta=0.04,
        max_prompt_length=None,
        max_completion_length=LONGEST,
        temperature=1.0,
        gradient_checkpointing=variant == "checkpointing",
        gradient_checkpointing_kwargs={"use_reentrant": False},
        **(liger(f"{kind.upper()}Config") if variant == "liger" else {}),
        **({"loss_type": variant} if variant in LOSSES else {}),
    )
    rows = datasets.Dataset.from_list([{"prompt": prompt} for prompt in prompts(40)])
    rewards: list[Any] = [reward]
    if variant == "reward_model":
        rewards.append(classifier(words))
        given["reward_processing_classes"] = [None, words]
    with tempfile.TemporaryDirectory() as folder:  # the reference is loaded by the model's name
        model(0, len(words)).save_pretrained(folder)
        policy = transformers.LlamaForCausalLM.from_pretrained(folder)
        if variant in ("function", "reward_model", *LOSSES):
            policy.generate = drawn(policy, words.eos_token_id)
        note_generation(policy, generated)
        return base(policy, rewards, args=args, train_dataset=rows, processing_class=words, **given)


def rloo_with_policies(base: Any, variant: str, steps: int, words: Any, generated: list[Any]) -> Any:
    # RLOO in the form that it has up to TRL 0.21: it is given two policies, and repeats each batch of prompts.
    args = config(
        "RLOOConfig",
        **COMMON,
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
    note_generation(policy, generated)
    rows = datasets.Dataset.from_list([{"input_ids": words(prompt)["input_ids"]} for prompt in prompts(40)])
    return base(
        config=args, processing_class=words, policy=policy, ref_policy=model(1, len(words)),
        reward_model=classifier(words) if variant == "reward_model" else reward, train_dataset=rows,
    )  # fmt: skip


def make(kind: str, variant: str, steps: int, how: str, generated: list[Any]) -> Any:
    words, base = tokenizer(), in_way(trl_class(f"{kind.upper()}Trainer"), how)
    old = "rloo_k" in inspect.signature(trl_class(f"{kind.upper()}Config")).parameters
    if old:
        return rloo_with_policies(base, variant, steps, words, generated)
    return grouped(kind, base, variant, steps, words, generated)


if __name__ == "__main__":
    run(make)
