"""Make a Trainer or an SFTTrainer of the installed version with the same call for all versions."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Sequence
from typing import Any

import torch

import fa2patch

from ..tiny_models import scale_up
from . import text
from .collators import Noted

RENAMED = {"eval_strategy": "evaluation_strategy", "max_length": "max_seq_length", "use_cpu": "no_cuda"}
"""Current names of arguments, and their names in old versions."""

BATCH = 8
LONGEST = 128


def tiny_llama(vocabulary: int = 512, **config: Any) -> Any:
    """Build an untrained Llama of two layers. Its weights are fixed and so large that every token affects later
    ones.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    settings = {
        "vocab_size": vocabulary, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
        "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**{**settings, **config}))
    scale_up(model)
    return model


class Stage:
    """What a stack's checks share: the data, the tokenizer, and how a trainer is made.

    Attributes:
        trl: whether the trainer is TRL's SFTTrainer.
        folder: the temporary folder of all its trainers.
        train, held_out: texts; :meth:`dataset` tokenizes them for Trainer, and TRL tokenizes them itself.
    """

    def __init__(self, trl: bool) -> None:
        self.trl = trl
        self.folder = tempfile.TemporaryDirectory(prefix="fa2patch-")
        texts = text.documents(904)
        self.tokenizer = text.tokenizer(texts)
        self.train, self.held_out = texts[:880], texts[880:]

    def examples(self, texts: Sequence[str]) -> list[dict[str, list[int]]]:
        """Tokenize texts and cut each to ``LONGEST`` tokens."""
        return [{"input_ids": ids[:LONGEST]} for ids in self.tokenizer(list(texts))["input_ids"]]

    def dataset(self, texts: Sequence[str]) -> Any:
        """Return the trainer's data: a dataset of texts for TRL, a list of tokenized examples for Trainer."""
        if not self.trl:
            return self.examples(texts)
        from datasets import Dataset

        return Dataset.from_dict({"text": list(texts)})

    def trainer(self, model: Any, collator: Any, *, held_out: bool = False, kind: Any = None, **options: Any) -> Any:
        """Make a trainer over ``train``.

        Args:
            held_out: whether it gets the held-out documents for evaluation.
            kind: the trainer's class, if not the default.
            options: arguments of TrainingArguments by their current names, or ``train_dataset``, or ``callbacks``,
                whose attribute ``trainer`` is set.
        """
        from transformers.trainer_callback import PrinterCallback

        data = options.pop("train_dataset", None) or self.dataset(self.train)
        callbacks = options.pop("callbacks", [])
        given = {
            "output_dir": tempfile.mkdtemp(dir=self.folder.name), "per_device_train_batch_size": BATCH,
            "per_device_eval_batch_size": BATCH, "learning_rate": 1e-3, "lr_scheduler_type": "constant",
            "logging_steps": 1, "seed": 0, "use_cpu": True, "save_strategy": "no", "report_to": "none",
            "disable_tqdm": True, "dataloader_pin_memory": False, "remove_unused_columns": self.trl,
            "bf16": False, "gradient_checkpointing": False,  # newer TRL turns both on by default
            **options,
        }  # fmt: skip
        sets = {"train_dataset": data, "eval_dataset": self.dataset(self.held_out) if held_out else None}
        make = self._sft if self.trl else self._plain
        trainer = make(model, collator, given, sets, kind)
        trainer.remove_callback(PrinterCallback)
        for callback in callbacks:
            callback.trainer = trainer
            trainer.add_callback(callback)
        return trainer

    def _plain(self, model: Any, collator: Any, given: dict[str, Any], sets: dict[str, Any], kind: Any) -> Any:
        from transformers import Trainer, TrainingArguments

        arguments = TrainingArguments(**_spelled(TrainingArguments, given))
        return (kind or Trainer)(model=model, args=arguments, data_collator=collator, **sets)

    def _sft(self, model: Any, collator: Any, given: dict[str, Any], sets: dict[str, Any], kind: Any) -> Any:
        import trl
        from transformers import TrainingArguments

        trainer = kind or trl.SFTTrainer
        config = getattr(trl, "SFTConfig", TrainingArguments)
        own = {"dataset_text_field": "text", "max_length": LONGEST}
        takes = inspect.signature(trl.SFTTrainer.__init__).parameters
        named = "processing_class" if "processing_class" in takes else "tokenizer"
        here = _spelled(config, {**own, **given} if config is not TrainingArguments else given)
        there = _spelled(trl.SFTTrainer, own) if config is TrainingArguments else {}
        return trainer(
            model=model, args=config(**here), data_collator=collator, **{named: self.tokenizer}, **there, **sets
        )

    def run(self, model: Any, collate: Any, *, patched: bool, steps: int, **options: Any) -> dict[str, Any]:
        """Train a model; return its losses step by step, its mini-batches, the trainer, the model and the last
        batch.
        """
        if patched:
            fa2patch.apply(model)
        collator = Noted(collate)
        trainer = self.trainer(model, collator, max_steps=steps, **options)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        if len(losses) != steps:
            raise RuntimeError(f"looked for the losses of {steps} steps in the trainer's log, found {len(losses)}")
        return {"losses": losses, "seen": collator.seen, "trainer": trainer, "model": model, "batch": collator.last}


def _spelled(callable_: Any, given: dict[str, Any]) -> dict[str, Any]:
    takes = inspect.signature(callable_).parameters
    return {name if name in takes else RENAMED.get(name, name): value for name, value in given.items()}


def weights(model: Any) -> dict[str, torch.Tensor]:
    """Return copies of a model's weights by name."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference between two models' weights, relative to the tensor's largest weight in
    ``other``.
    """
    if one.keys() != other.keys():
        raise RuntimeError(f"weights of other names: {sorted(one.keys() ^ other.keys())[:4]}")
    return max(float((one[name] - other[name]).abs().max() / other[name].abs().max().clamp(min=1e-9)) for name in one)


def largest_relative_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest relative difference between two lists of losses of the same length."""
    if len(losses) != len(reference):
        raise RuntimeError(f"{len(losses)} losses against {len(reference)}")
    return max(abs(a - b) / abs(b) for a, b in zip(losses, reference))
