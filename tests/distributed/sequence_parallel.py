"""Split a packed row in two by DeepSpeed's Ulysses (``sp_size=2``): ``sequence_parallel.py OUT``, run by torchrun.

The script does by hand what Trainer does: it calls ``register_with_transformers``, halves each tensor, and weights the
losses of both ranks' halves by their tokens. The right loss is that of one process with padded documents.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

import fa2patch
from compat_matrix.ecosystem.child import versions
from compat_matrix.ecosystem.collators import IGNORED, packed, padded
from compat_matrix.ecosystem.training import tiny_llama

BOUND = 1e-3
LENGTHS = {"cut_between": (10, 22, 9, 23), "cut_inside": (10, 40, 14)}
"""Document lengths of the row. It is cut in the middle, either between two documents or inside one."""


def examples(lengths: tuple[int, ...]) -> list[dict[str, list[int]]]:
    drawn = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(2, 512, (length,), generator=drawn).tolist()} for length in lengths]


def half(batch: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's half of each tensor. Labels are shifted first, as in Ulysses' own loader."""
    labels = torch.nn.functional.pad(batch.pop("labels"), (0, 1), value=IGNORED)
    batch["shift_labels"] = labels[:, 1:]
    length = batch["input_ids"].shape[1] // 2
    at = dist.get_rank() * length
    return {name: value[:, at : at + length].contiguous() for name, value in batch.items()}


def loss(model: Any, batch: dict[str, Any]) -> float:
    """Return the mean loss over the tokens of both halves."""
    labels = batch.pop("shift_labels")
    logits = model(**batch, use_cache=False).logits
    total = torch.nn.functional.cross_entropy(logits[0], labels[0], ignore_index=IGNORED, reduction="sum")
    sums = torch.stack([total.detach(), (labels != IGNORED).sum().float()])
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])


def tried(lengths: tuple[int, ...], patched: bool) -> dict[str, Any]:
    model = tiny_llama().train()
    if patched:
        fa2patch.apply(model)
    try:
        return {"loss": loss(model, half(packed(examples(lengths))))}
    except fa2patch.Fa2PatchError as error:
        return {"refused": f"{type(error).__name__}: {error}"}


@torch.no_grad()
def main(out: str) -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", verbose=False)
    right = {name: float(tiny_llama()(**padded(examples(lengths))).loss) for name, lengths in LENGTHS.items()}
    UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=tiny_llama(), core_attn_implementation="sdpa", sequence_parallel_size=2,
        micro_batch_size=1, seq_length=None, seq_length_is_variable=True,
    )  # fmt: skip
    finding: dict[str, Any] = {"ok": True, "bound": BOUND}
    for name, lengths in LENGTHS.items():
        found = {"fa2patch": tried(lengths, patched=True), "alone": tried(lengths, patched=False)}
        for one in found.values():
            if "loss" in one:
                one["off_by"] = abs(one["loss"] / right[name] - 1)
        finding[name] = {"right": right[name], **found}
        finding["ok"] = finding["ok"] and found["fa2patch"].get("off_by", 0.0) < BOUND
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps({"versions": versions(), "finding": finding}))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # under load, shutting down gloo's threads sometimes aborts the process


if __name__ == "__main__":
    main(*sys.argv[1:])
