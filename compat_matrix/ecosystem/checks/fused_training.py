"""The same losses in whole trainings: Trainer's ``use_liger_kernel``, SFTTrainer, ``fa2patch run --collate``."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

import fa2patch

from ..training import Stage, largest_relative_difference, tiny_llama
from .fused import LOSS_ALONE, Finding, finding, restored

BOUND = 2e-5
"""Relative bound on each step's loss. First labels are one in fifty and change a mean over all labels by less
than a thousandth.
"""
STEPS = 3
SCRIPT = Path(__file__).parents[1] / "scripts" / "trains_with_liger.py"


def padded(features: Any) -> dict[str, Any]:
    """Collate one padded row for each example. Every token is a label, although nothing predicts a row's first."""
    ids = [torch.tensor(one["input_ids"]) for one in features]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(ids, batch_first=True, padding_value=-100),
        "attention_mask": pad_sequence([torch.ones_like(one) for one in ids], batch_first=True),
    }


def packed(features: Any) -> dict[str, Any]:
    """Collate one packed row. The patch has to ignore the documents' first labels."""
    ids = [torch.tensor(one["input_ids"]) for one in features]
    row = torch.cat(ids)[None]
    return {"input_ids": row, "labels": row, "position_ids": torch.cat([torch.arange(len(one)) for one in ids])[None]}


def trained(stage: Stage, order: str, collate: Callable[[Any], Any], **options: Any) -> list[float]:
    """Return the losses of some steps.

    Args:
        order: whether the model is patched ``before Trainer`` or ``after Trainer``; otherwise it is not patched.
    """
    model = tiny_llama()
    if order == "before Trainer":
        fa2patch.apply(model)
    # otherwise Trainer counts labels before the forward, first labels included, padded and packed
    trainer = stage.trainer(model, collate, max_steps=STEPS, average_tokens_across_devices=False, **options)
    trainer.model_accepts_loss_kwargs = False
    if order == "after Trainer":
        fa2patch.apply(trainer.model)
    try:
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    finally:
        fa2patch.revert(trainer.model)


def judged(run: Callable[[], list[float]], right: list[float]) -> str:
    """Return ``right``, ``refused: ...`` or how far the losses are off."""
    try:
        losses = run()
    except fa2patch.Fa2PatchError as error:
        return f"refused: {type(error).__name__}"
    apart = largest_relative_difference(losses, right)
    return "right" if apart < BOUND else f"losses off by {apart:.0e}: {losses[0]:.4f} for {right[0]:.4f}"


def in_both_orders(stage: Stage, right: list[float], **options: Any) -> Finding:
    """Train with the model patched before and after Trainer is made."""
    cases = {}
    for order in ("before Trainer", "after Trainer"):
        with restored():
            cases[f"patched {order}"] = judged(lambda: trained(stage, order, packed, **options), right)  # noqa: B023
    return finding(cases)


def trainer_with_liger(stage: Stage) -> Finding:
    """Trainer's ``use_liger_kernel``."""
    if not importlib.util.find_spec("liger_kernel"):
        return {"skipped": "no liger_kernel in this stack"}
    right = trained(stage, "", padded)
    return in_both_orders(stage, right, use_liger_kernel=True, liger_kernel_config=LOSS_ALONE)


def sft_with_its_fused_head(stage: Stage) -> Finding:
    """SFTTrainer, with its fused head where it has one."""
    if not stage.trl:
        return {"skipped": "no TRL here"}
    return in_both_orders(stage, trained(stage, "", padded))


def run_with_liger(stage: Stage) -> Finding:
    """``fa2patch run --collate`` of a script that trains with Liger must reproduce the script's losses or refuse."""
    if not importlib.util.find_spec("liger_kernel"):
        return {"skipped": "no liger_kernel in this stack"}
    with tempfile.TemporaryDirectory(dir=stage.folder.name) as folder:
        tiny_llama().save_pretrained(folder)
        stage.tokenizer.save_pretrained(folder)
        examples = [one["input_ids"][:24] for one in stage.examples(stage.train[:64])]
        Path(folder, "documents.json").write_text(json.dumps(examples), encoding="utf-8")
        return finding({name: _run(folder, name) for name in ("LlamaForCausalLM", "MyModel")})


def _run(folder: str, name: str) -> str:
    right, error = _started([], folder, name)
    if right is None:
        raise RuntimeError(f"the script fails without fa2patch: {error[-2000:]}")
    losses, error = _started(["-m", "fa2patch", "run", "--collate"], folder, name)
    if losses is not None:
        said = judged(lambda: losses, right)
        padded = next((line for line in error.splitlines() if "fa2patch: Trainer trains padded" in line), None)
        return "refused: it says that it trains padded" if padded and said == "right" else said
    refused = next((known for known in vars(fa2patch.errors) if f"{known}:" in error), None)
    if refused is None:
        raise RuntimeError(f"looked for an error of fa2patch's, found {error[-2000:]}")
    return f"refused: {refused}"


def _started(before: list[str], folder: str, name: str) -> tuple[list[float] | None, str]:
    """Return the losses in the last line of the script's output, or None if it failed, and its stderr."""
    command = [sys.executable, *before, str(SCRIPT), folder, name]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TMPDIR": folder})
    if done.returncode:
        return None, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr
