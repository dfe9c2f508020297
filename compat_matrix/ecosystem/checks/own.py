"""TRL's own collator, ``padding_free`` and ``packing``, on a patched model."""

from __future__ import annotations

import inspect
from typing import Any

import torch

import fa2patch
from fa2patch.probing.batches import spans_of

from ..collators import IGNORED
from ..training import Stage, largest_relative_difference, tiny_llama

BOUND = 1e-3
ANSWER = "\n### Answer:"


def completion_collator(stage: Stage, steps: int = 20) -> dict[str, Any]:
    """Compare TRL's DataCollatorForCompletionOnlyLM with ``padding_free`` and padded."""
    kind = _trl("DataCollatorForCompletionOnlyLM") if stage.trl else None
    if kind is None:
        return {"skipped": "no TRL here" if not stage.trl else "this TRL has none any more"}
    if "padding_free" not in inspect.signature(kind).parameters:
        return {"skipped": "this TRL's has no padding_free yet"}
    from datasets import Dataset

    template = stage.tokenizer(ANSWER, add_special_tokens=False)["input_ids"]
    texts = [f"{one[: len(one) // 4]}{ANSWER}{one[len(one) // 4 :]}" for one in stage.train if len(one) < 200]

    def run(padding_free: bool) -> dict[str, Any]:
        collator = kind(template, tokenizer=stage.tokenizer, padding_free=padding_free)
        data = Dataset.from_dict({"text": texts})
        return stage.run(tiny_llama(), collator, patched=padding_free, steps=steps, train_dataset=data)

    reference, flat = run(False), run(True)
    difference = largest_relative_difference(flat["losses"], reference["losses"])
    verification = fa2patch.verify(flat["model"], batch=flat["batch"], max_documents=3)
    return {
        "ok": difference < BOUND and flat["seen"] == reference["seen"] and verification.ok,
        "steps": steps,
        "batch": shapes(flat["batch"]),
        "largest_relative_difference": difference,
    }


def padding_free(stage: Stage) -> dict[str, Any]:
    """Train with SFTConfig's ``padding_free=True``."""
    return _configured(stage, padding_free=True)


def packing(stage: Stage) -> dict[str, Any]:
    """Train with SFTConfig's ``packing=True``."""
    return _configured(stage, packing=True)


def _configured(stage: Stage, steps: int = 10, **asked: bool) -> dict[str, Any]:
    """Record which batch SFTConfig's own packing passes to the model, and what fa2patch does with it.

    If nothing in the batch says where documents start, they cannot be isolated, and ``verify`` has to say so.
    """
    config = _trl("SFTConfig") if stage.trl else None
    (option,) = asked
    if config is None or option not in inspect.signature(config).parameters:
        return {"skipped": "no TRL here" if not stage.trl else f"this TRL's SFTConfig has no {option}"}
    found: dict[str, Any] = {}
    for name in ("as_sdpa", "named_flash_attention_2"):
        model = tiny_llama()
        fa2patch.apply(model)
        if name != "as_sdpa":
            model.config._attn_implementation = "flash_attention_2"  # TRL looks only at the config
        length = {"max_length": None} if option == "padding_free" else {}  # TRL 1.16 requires it
        trainer = stage.trainer(model, None, max_steps=steps, **asked, **length)
        batch = dict(next(iter(trainer.get_train_dataloader())))
        found[name] = {"batch": shapes(batch), **_looked_at(model, batch)}
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found[name]["trained_steps"] = len(losses)
        found[name]["first_loss"] = losses[0]
        if found[name]["verify"] == "isolated":
            found[name] |= _by_hand(batch, losses[0])
    return {"ok": all(_is_right(one) for one in found.values()), **found}


def _looked_at(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    try:
        verification = fa2patch.verify(model, batch=batch, max_documents=3)
    except fa2patch.Fa2PatchError as error:
        return {"verify": type(error).__name__, "said": error.message}
    return {"verify": "isolated", "documents": len(verification.documents)}


def _is_right(one: dict[str, Any]) -> bool:
    if not {"position_ids", "cu_seq_lens_q", "seq_idx"} & {*one["batch"]}:
        return one["verify"] == "BadBatch"
    return one.get("off_by", 1) < BOUND


@torch.no_grad()
def _by_hand(batch: dict[str, Any], loss: float) -> dict[str, Any]:
    """Compare the untrained model's loss on the batch's documents, each run alone, with the trainer's first loss.

    The batch is the trainer's first, because its sampler is seeded. TRL keeps every document's first label, which
    nothing predicts; Trainer 4.46 to 4.57 divides by those labels too.
    """
    model = tiny_llama().eval()
    total, trained = 0.0, 0
    for span in spans_of({name: value for name, value in batch.items() if name != "labels"}):
        ids, labels = span.of(batch["input_ids"])[None], span.of(batch["labels"])[1:]
        logits = model(input_ids=ids).logits[0, :-1]
        total += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED))
        trained += int((labels != IGNORED).sum())
    labelled = int((batch["labels"] != IGNORED).sum())
    means = {"tokens trained on": total / trained, "labels": total / labelled}
    divided_by = min(means, key=lambda name: abs(means[name] - loss))
    return {"by_hand": means[divided_by], "divided_by": divided_by, "off_by": abs(loss / means[divided_by] - 1)}


def shapes(batch: dict[str, Any]) -> dict[str, str]:
    """Describe a batch: dtype and shape of each tensor, other values as text."""
    return {
        name: f"{str(value.dtype).replace('torch.', '')} {list(value.shape)}" if torch.is_tensor(value) else str(value)
        for name, value in batch.items()
    }


def _trl(name: str) -> Any:
    import trl

    return getattr(trl, name, None)
