"""Checks of a batch's optional fields, the division of its loss, ``verify`` on the trainer's model, and streams."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch

import fa2patch

from ..collators import packed, padded, tokens
from ..training import LONGEST, Stage, furthest, largest_relative_difference, tiny_llama, weights

BOUND = 1e-3
SAME = 1e-4


def lengths(stage: Stage, steps: int = 10) -> dict[str, Any]:
    """Train with the collator's lengths and ``seq_idx``, which Llama's own forward up to 4.44 does not take."""
    with_lengths = functools.partial(packed, return_flash_attn_kwargs=True, return_seq_idx=True)
    reference = stage.run(tiny_llama(), padded, patched=False, steps=steps)
    run = stage.run(tiny_llama(), with_lengths, patched=True, steps=steps)
    difference = largest_relative_difference(run["losses"], reference["losses"])
    try:
        alone = stage.run(tiny_llama(), with_lengths, patched=False, steps=steps)
    except TypeError as error:
        without = {"refused": str(error).splitlines()[0]}
    else:
        without = {"largest_relative_difference": largest_relative_difference(alone["losses"], reference["losses"])}
    return {
        "ok": difference < BOUND and "cu_seq_lens_q" in run["batch"],
        "steps": steps,
        "largest_relative_difference": difference,
        "weights_off_by": furthest(weights(run["model"]), weights(reference["model"])),
        "alone": without,
    }


def counting(stage: Stage) -> dict[str, Any]:
    """Compare one step's loss when each row's first token is a label, as upstream's padding collator leaves it.

    A padded loss that is divided by the number of labels is then smaller by exactly these labels. In packed training
    the loss is divided by the tokens trained on, in every version.
    """
    from transformers import DataCollatorForLanguageModeling

    collate = DataCollatorForLanguageModeling(stage.tokenizer, mlm=False)
    features: list[Any] = []

    def upstream(given: Any) -> Any:
        features.append(tokens(given))
        return collate([{"input_ids": one["input_ids"]} for one in given])

    reference = stage.run(tiny_llama(), upstream, patched=False, steps=1)
    run = stage.run(tiny_llama(), packed, patched=True, steps=1)
    trained = sum(len(one["input_ids"]) - 1 for one in features[0])
    ratio = reference["losses"][0] / run["losses"][0]
    as_counted = trained / (trained + len(features[0]))
    counts_unused = abs(ratio - as_counted) < abs(ratio - 1)
    return {
        "ok": min(abs(ratio - 1), abs(ratio - as_counted)) < 1e-4,
        "padded_by_packed": ratio,
        "tokens_trained_on": trained,
        "first_labels": len(features[0]),
        "upstream_counts_first_labels": counts_unused,
    }


def verified(stage: Stage) -> dict[str, Any]:
    """Run ``fa2patch.verify`` on the model in the trainer, with a batch of its loader, before and after training."""
    model = tiny_llama()
    fa2patch.apply(model)
    trainer = stage.trainer(model, packed, max_steps=2)
    batch = next(iter(trainer.get_train_dataloader()))
    found = [fa2patch.verify(trainer.model, batch=batch, max_documents=3)]
    trainer.train()
    found.append(fa2patch.verify(trainer.model, batch=batch, max_documents=3))
    fa2patch.revert(model)
    alone = fa2patch.verify(tiny_llama(), batch=batch, max_documents=3, strict=False)
    return {
        "ok": all(one.ok and one.patched for one in found),
        "documents": len(found[0].documents),
        "moved": max(document.moved for one in found for document in one.documents),
        "alone": "isolated" if alone.ok else alone.reason,
    }


def streaming(stage: Stage, steps: int = 10) -> dict[str, Any]:
    """Train on a ``datasets`` stream of unknown length."""
    if not importlib.util.find_spec("datasets"):
        return {"skipped": "no datasets in this stack"}
    from datasets import Features, IterableDataset, Sequence, Value

    features = Features({"input_ids": Sequence(Value("int64"))})  # TRL before 0.12 tokenizes no stream

    def stream() -> Any:
        yield from stage.examples(stage.train)

    def made() -> Any:
        return IterableDataset.from_generator(stream, features=features)

    reference = stage.run(tiny_llama(), padded, patched=False, steps=steps, train_dataset=made())
    run = stage.run(tiny_llama(), packed, patched=True, steps=steps, train_dataset=made())
    difference = largest_relative_difference(run["losses"], reference["losses"])
    return {
        "ok": difference < BOUND and run["seen"] == reference["seen"] and torch.is_tensor(run["batch"]["input_ids"]),
        "steps": steps,
        "largest_relative_difference": difference,
        "same_mini_batches": run["seen"] == reference["seen"],
        "longest": LONGEST,
    }
