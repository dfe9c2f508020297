"""Group relative policy optimization (GRPO) in a loop of your own: each prompt is computed once for its completions.

    python grpo.py --model NAME --data FILE.jsonl     (per line: prompt)

The reward is a toy: the share of the letter "e" in the completion. TRL is not needed.
"""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import small
import torch
from torch.nn.utils.rnn import pad_sequence

import fa2patch
from fa2patch.packing import Shared, share

PROMPTS, COMPLETIONS, NEW_TOKENS, UPDATES = 4, 8, 16, 2  # in each step
CLIP, BETA = 0.2, 0.02  # the bounds of the ratio, the weight of the KL divergence from the first model


def main(argv: list[str] | None = None) -> list[float]:
    """Train and return the loss of every step's last update."""
    options = small.options(__doc__, argv)
    texts = small.docstrings()
    model, tokenizer = small.load(options, texts)
    tokenizer.truncation_side = "left"
    asked = tokenizer(questions(options.data, texts), truncation=True, max_length=128)["input_ids"]

    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()  # no dropout: the first ratio is 1
    fa2patch.apply(model)
    reference = copy.deepcopy(model)  # the copy is patched as well
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6 if options.model else 5e-3)
    losses = []
    for step in range(options.steps):
        prompts = [asked[(step * PROMPTS + at) % len(asked)] for at in range(PROMPTS) for _ in range(COMPLETIONS)]
        completions = sample(model, tokenizer, prompts)
        rewards = torch.tensor([reward(tokenizer.decode(ids, skip_special_tokens=True)) for ids in completions])
        sequences = [prompt + completion for prompt, completion in zip(prompts, completions)]
        row = share(sequences, prompts=list(map(len, prompts))).to(model.device)
        with torch.no_grad():
            old, first = (logps(each, row, prompts) for each in (model, reference))
        loss_of = partial(grpo_loss, old=old, first=first, gains=advantages(rewards))
        for update in range(UPDATES):
            loss = loss_of(logps(model, row, prompts))
            if step == 0 and update == 1:  # before, every ratio is 1 and the loss 0
                padded = loss_of(padded_logps(model, sequences, prompts))
                print(f"loss of the same update: {padded:.6f} padded, {loss:.6f} with each prompt once")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        tokens = f"{row.tokens} tokens instead of {row.tokens_before}"
        print(f"step {step + 1}: reward {rewards.mean():.3f}, loss {losses[-1]:.4f}, {tokens}")
    return losses


def questions(file: Path | None, texts: small.Texts) -> list[str]:
    """Return the prompts of the file, or signatures of functions behind two examples with their docstrings."""
    if file:
        return [json.loads(line)["prompt"] for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    examples = ["".join(map("{}{}\n".format, *zip(*texts[at - 2 : at]))) for at in range(2, len(texts))]
    return [example + prompt for example, (prompt, _) in zip(examples, texts[2:])]


@torch.no_grad()
def sample(model: Any, tokenizer: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Return a completion for each prompt, to its end token."""
    longest, end = max(map(len, prompts)), tokenizer.eos_token_id
    ids = torch.tensor([[end] * (longest - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    made = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=True, top_k=0, pad_token_id=end
    )
    made = made[:, longest:].tolist()
    return [each[: each.index(end) + 1] if end in each else each for each in made]


def reward(text: str) -> float:
    """Return the share of the letter "e" in a completion."""
    return text.count("e") / max(len(text), 1)


def advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Compare each completion's reward with those of the same prompt, `[completions]`."""
    groups = rewards.view(-1, COMPLETIONS)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def logps(model: Any, row: Shared, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Return the log-probability of each completion's tokens."""
    found = row.logps(model(**row.batch, use_cache=False).logits)
    return [each[len(prompt) - 1 :] for each, prompt in zip(found, prompts)]


@torch.no_grad()
def padded_logps(model: Any, sequences: list[list[int]], prompts: list[list[int]]) -> list[torch.Tensor]:
    """Return what `logps` returns, computed in a padded batch, to compare."""
    ids = pad_sequence([torch.tensor(each) for each in sequences], batch_first=True).to(model.device)
    mask = pad_sequence([torch.ones(len(each)) for each in sequences], batch_first=True).to(model.device)
    logits = model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits.float()
    found = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    return [own[len(prompt) - 1 : len(each) - 1] for own, each, prompt in zip(found, sequences, prompts)]


def grpo_loss(
    new: list[torch.Tensor], old: list[torch.Tensor], first: list[torch.Tensor], gains: torch.Tensor
) -> torch.Tensor:
    """Return the loss of equation 3 of https://arxiv.org/abs/2402.03300. `first` is of the model at the start."""
    losses = []
    for own, before, start, gain in zip(new, old, first, gains.to(new[0].device)):
        ratio, change = (own - before).exp(), start - own
        surrogate = torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain)
        losses.append((BETA * (change.exp() - change - 1) - surrogate).mean())
    return torch.stack(losses).mean()


if __name__ == "__main__":
    main()
