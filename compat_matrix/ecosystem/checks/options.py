"""Training options under which packed must equal padded: gradient accumulation, checkpointing, resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import fa2patch

from ..collators import Noted, packed, padded, tokens
from ..training import BATCH, Stage, furthest, largest_relative_difference, tiny_llama, weights

BOUND = 1e-3
SAME = 1e-4
"""Relative to the largest weight, after a few steps of Adam in which sums are taken in another order."""


def accumulation(stage: Stage, steps: int = 10, every: int = 4) -> dict[str, Any]:
    """Compare packed with padded, and find whether the first loss is a mean over tokens or over micro-batches."""
    micro: list[Any] = []

    def noting(features: Any) -> Any:
        micro.append(tokens(features))
        return packed(features)

    options = {"steps": steps, "gradient_accumulation_steps": every}
    reference = stage.run(tiny_llama(), padded, patched=False, **options)
    run = stage.run(tiny_llama(), noting, patched=True, **options)
    by_token, by_batch = _means(micro[:every])
    first = run["losses"][0]
    over = min((abs(first - by_token), "tokens"), (abs(first - by_batch), "micro-batches"))
    difference = largest_relative_difference(run["losses"], reference["losses"])
    off = furthest(weights(run["model"]), weights(reference["model"]))
    return {
        "ok": difference < BOUND and off < SAME and over[0] < 1e-3 * first and run["seen"] == reference["seen"],
        "steps": steps,
        "gradient_accumulation_steps": every,
        "largest_relative_difference": difference,
        "weights_off_by": off,
        "first_loss": first,
        "mean_over_tokens": by_token,
        "mean_of_micro_batch_means": by_batch,
        "loss_is_a_mean_over": over[1],
    }


@torch.no_grad()
def _means(batches: list[list[dict[str, list[int]]]]) -> tuple[float, float]:
    """Compute from single examples the untrained model's loss per token, and the mean of the batches' means."""
    model = tiny_llama().eval()
    sums, counts = [], []
    for batch in batches:
        losses = []
        for example in batch:
            ids = torch.tensor([example["input_ids"]])
            logits = model(input_ids=ids).logits[0, :-1]
            losses.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none"))
        together = torch.cat(losses)
        sums.append(float(together.sum()))
        counts.append(together.numel())
    return sum(sums) / sum(counts), sum(total / count for total, count in zip(sums, counts)) / len(sums)


def checkpointing(stage: Stage, steps: int = 10) -> dict[str, Any]:
    """Compare packed training with gradient checkpointing, in both modes, with packed training without it."""
    reference = stage.run(tiny_llama(), packed, patched=True, steps=steps, gradient_checkpointing=False)
    found: dict[str, Any] = {"ok": True, "steps": steps}
    for name, reentrant in (("reentrant", True), ("not_reentrant", False)):
        run = stage.run(
            tiny_llama(),
            packed,
            patched=True,
            steps=steps,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": reentrant},
        )
        on = any(getattr(module, "gradient_checkpointing", False) for module in run["model"].modules())
        difference = largest_relative_difference(run["losses"], reference["losses"])
        off = furthest(weights(run["model"]), weights(reference["model"]))
        found[name] = {"largest_relative_difference": difference, "weights_off_by": off, "was_on": on}
        found["ok"] = found["ok"] and on and difference < BOUND and off < SAME
    return found


def resume(stage: Stage, steps: int = 8) -> dict[str, Any]:
    """Resume from a checkpoint at half with a new trainer and model: the weights must be equal bit for bit."""
    saved = {"save_strategy": "steps", "save_steps": steps // 2}
    whole = stage.run(tiny_llama(), packed, patched=True, steps=steps, **saved)
    folder = Path(whole["trainer"].args.output_dir)
    checkpoint = folder / f"checkpoint-{steps // 2}"
    model = tiny_llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # a weight that the checkpoint does not restore stays zero
    fa2patch.apply(model)
    trainer = stage.trainer(model, Noted(packed), max_steps=steps, **saved)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    off = furthest(weights(model), weights(whole["model"]))
    config = (checkpoint / "config.json").read_text(encoding="utf-8")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "ok": off == 0 and losses == whole["losses"] and "fa2patch" not in config,
        "steps": steps,
        "resumed_at": steps // 2,
        "weights_off_by": off,
        "same_losses": losses == whole["losses"],
        "batch": BATCH,
    }
