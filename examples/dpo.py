"""Direct preference optimization without padding: both documents of every pair in one packed row.

    python dpo.py --model NAME --data FILE.jsonl     (per line: prompt, chosen, rejected)

To use TRL instead of your own loop, replace `trl.DPOTrainer` by `fa2patch.packed_trainer()`.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import small
import torch

import fa2patch
from fa2patch.preference import DataCollatorForPreferenceFlattening, per_document_logps

BETA, PAIRS = 0.1, 4


def main(argv: list[str] | None = None) -> list[float]:
    """Train and return the loss of every step."""
    options = small.options(__doc__, argv)
    model, tokenizer = small.load(options, small.docstrings())
    pairs = [encode(pair, tokenizer) for pair in preferences(options)]

    model.to("cuda" if torch.cuda.is_available() else "cpu")
    fa2patch.apply(model)
    reference = copy.deepcopy(model).eval()  # the copy is patched as well
    collate = DataCollatorForPreferenceFlattening(max_length=512)

    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-6 if options.model else 1e-3)
    losses = []
    for step in range(options.steps):
        batch = collate([pairs[(step * PAIRS + index) % len(pairs)] for index in range(PAIRS)])
        batch = {key: value.to(model.device) for key, value in batch.items()}
        with torch.no_grad():
            expected = logps(reference, batch)
        chosen, rejected = (BETA * (logps(model, batch) - expected)).chunk(2)  # chosen documents come first
        loss = -torch.nn.functional.logsigmoid(chosen - rejected).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step + 1}: loss {losses[-1]:.4f}")
    return losses


def logps(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return each document's sum of its completion's log-probabilities, `[documents]`."""
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    return per_document_logps(logits, batch["labels"], batch["position_ids"])[0]


def preferences(options: Any) -> list[dict[str, str]]:
    """Return pairs from the file, or docstrings as chosen and a placeholder as rejected completions."""
    if options.data:
        return [json.loads(line) for line in options.data.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [{"prompt": prompt, "chosen": own, "rejected": "To be written."} for prompt, own in small.docstrings()]


def encode(pair: dict[str, str], tokenizer: Any) -> dict[str, list[int]]:
    """Tokenize a pair as the preference collator expects it."""
    prompt = tokenizer(pair["prompt"])["input_ids"]
    chosen, rejected = (
        tokenizer(pair[side], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        for side in ("chosen", "rejected")
    )
    return {"prompt_input_ids": prompt, "chosen_input_ids": chosen, "rejected_input_ids": rejected}


if __name__ == "__main__":
    main()
