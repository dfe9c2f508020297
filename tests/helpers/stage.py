"""What tests in stacks train with: documents, a tokenizer, a tiny Llama, collators, and a trainer of any release."""

from __future__ import annotations

import ast
import functools
import inspect
import sysconfig
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

import fa2patch
from compat_matrix.tiny_models import scale_up

END, PAD = "<|end|>", "<|pad|>"
# A document has at most so many, which are about a third as many tokens.
CHARACTERS = 400

LONGEST = 128  # tokens of a document at most

BATCH = 8
IGNORED = -100
# Current names of arguments, and their names in old versions.
RENAMED = {"eval_strategy": "evaluation_strategy", "max_length": "max_seq_length", "use_cpu": "no_cuda"}

Features = Sequence[Mapping[str, Any]]
Batch = dict[str, Any]


def texts(count: int) -> list[str]:
    # Unique docstrings of the standard library's top modules, ordered by hash to mix modules and lengths.
    found: dict[str, None] = {}
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        found.update(dict.fromkeys(_docstrings(file)))
    ordered = sorted(found, key=lambda text: zlib.crc32(text.encode()))  # unlike hash, the same in every process
    if len(ordered) < count:
        raise RuntimeError(f"looked for {count} docstrings in the standard library, found {len(ordered)}")
    return ordered[:count]


def _docstrings(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            text = (ast.get_docstring(node) or "")[:CHARACTERS].strip()
            if len(text) > 8:
                yield text


def tokenizer_of(texts: list[str]) -> Any:
    # A byte-level BPE of 512 tokens.
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": [END, PAD], "initial_alphabet": alphabet, "show_progress": False}
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=512, **options))
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=END, pad_token=PAD, model_input_names=["input_ids", "attention_mask"]
    )


def tiny_llama(vocabulary: int = 512, **config: Any) -> Any:
    # The weights are fixed, and so large that every token affects later ones.
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


def tokens(features: Features) -> list[dict[str, list[int]]]:
    # The first label is ignored, because nothing predicts it. Without this, Trainer 4.46 to 4.57 counts it among the
    # tokens by which a padded batch's loss is divided.
    kept = [{"input_ids": [*one["input_ids"]], "labels": [*one.get("labels", one["input_ids"])]} for one in features]
    for one in kept:
        one["labels"][0] = IGNORED
    return kept


def padded(features: Features) -> Batch:
    return rows(tokens(features))


def rows(examples: Features) -> Batch:
    ids = [torch.tensor(one["input_ids"]) for one in examples]
    labels = [torch.tensor(one["labels"]) for one in examples]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
    }


def packed(features: Features, **options: Any) -> Batch:
    return fa2patch.DataCollatorWithFlattening(**options)(tokens(features))


def packed_in_two_rows(features: Features) -> Batch:
    # Each row gets half of the examples. The mask is zero on the shorter one's padding.
    halves = [packed(half) for half in (features[::2], features[1::2]) if half]
    halves = [{**row, "attention_mask": torch.ones_like(row["input_ids"])} for row in halves]
    padding = {"input_ids": 0, "position_ids": 0, "attention_mask": 0, "labels": IGNORED}
    return {
        name: pad_sequence([row[name][0] for row in halves], batch_first=True, padding_value=fill)
        for name, fill in padding.items()
    }


class Noted:
    def __init__(self, collate: Callable[[Features], Batch]) -> None:
        self.collate = collate
        self.seen: list[int] = []  # a checksum of each batch's token ids
        self.last: Batch = {}

    def __call__(self, features: Features) -> Batch:
        self.seen.append(zlib.crc32(repr([list(one["input_ids"]) for one in features]).encode()))
        self.last = self.collate(features)
        return self.last


class Stage:
    """What tests in a stack share: the data, the tokenizer, and how a trainer is made."""

    def __init__(self, trl: bool) -> None:
        self.trl = trl  # whether the trainer is TRL's SFTTrainer
        self.folder = tempfile.TemporaryDirectory(prefix="fa2patch-")  # of all its trainers
        found = texts(904)
        self.tokenizer = tokenizer_of(found)
        self.train, self.held_out = found[:880], found[880:]

    def examples(self, texts: Sequence[str]) -> list[dict[str, list[int]]]:
        return [{"input_ids": ids[:LONGEST]} for ids in self.tokenizer(list(texts))["input_ids"]]

    def dataset(self, texts: Sequence[str]) -> Any:
        # TRL tokenizes the texts itself.
        if not self.trl:
            return self.examples(texts)
        from datasets import Dataset

        return Dataset.from_dict({"text": list(texts)})

    def trainer(self, model: Any, collator: Any, *, held_out: bool = False, kind: Any = None, **options: Any) -> Any:
        # ``options`` are arguments of TrainingArguments by their current names, or ``train_dataset``, or ``callbacks``,
        # whose attribute ``trainer`` is set.
        from transformers import Trainer, TrainingArguments
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
        if self.trl:
            trainer = self._sft(given, kind)(model=model, data_collator=collator, **sets)
        else:
            arguments = TrainingArguments(**_spelled(TrainingArguments, given))
            trainer = (kind or Trainer)(model=model, args=arguments, data_collator=collator, **sets)
        trainer.remove_callback(PrinterCallback)
        for callback in callbacks:
            callback.trainer = trainer
            trainer.add_callback(callback)
        return trainer

    def _sft(self, given: dict[str, Any], kind: Any) -> Any:
        # TRL's own arguments went to the trainer before there was an SFTConfig.
        import trl
        from transformers import TrainingArguments

        config = getattr(trl, "SFTConfig", TrainingArguments)
        own = {"dataset_text_field": "text", "max_length": LONGEST}
        takes = inspect.signature(trl.SFTTrainer.__init__).parameters
        named = "processing_class" if "processing_class" in takes else "tokenizer"
        old = config is TrainingArguments
        there = _spelled(trl.SFTTrainer, own) if old else {}
        arguments = config(**_spelled(config, given if old else {**own, **given}))
        return functools.partial(kind or trl.SFTTrainer, args=arguments, **{named: self.tokenizer}, **there)

    def run(self, model: Any, collate: Any, *, patched: bool, steps: int, **options: Any) -> dict[str, Any]:
        if patched:
            fa2patch.apply(model)
        collator = Noted(collate)
        trainer = self.trainer(model, collator, max_steps=steps, **options)
        trainer.train()
        losses = losses_of(trainer)
        if len(losses) != steps:
            raise RuntimeError(f"looked for the losses of {steps} steps in the trainer's log, found {len(losses)}")
        return {"losses": losses, "seen": collator.seen, "trainer": trainer, "model": model, "batch": collator.last}


def _spelled(callable_: Any, given: dict[str, Any]) -> dict[str, Any]:
    takes = inspect.signature(callable_).parameters
    return {name if name in takes else RENAMED.get(name, name): value for name, value in given.items()}


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    # The difference is relative to the largest value of the same tensor in ``other``.
    if one.keys() != other.keys():
        raise RuntimeError(f"weights of other names: {sorted(one.keys() ^ other.keys())[:4]}")
    return max(float((one[name] - other[name]).abs().max() / other[name].abs().max().clamp(min=1e-9)) for name in one)


def largest_relative_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    if len(losses) != len(reference):
        raise RuntimeError(f"{len(losses)} losses against {len(reference)}")
    return max(abs(a - b) / abs(b) for a, b in zip(losses, reference))


def compared(run: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, float]:
    """How far two results of :meth:`Stage.run` are apart, in their losses and in their models' weights."""
    return {
        "largest_relative_difference": largest_relative_difference(run["losses"], reference["losses"]),
        "weights_off_by": furthest(weights(run["model"]), weights(reference["model"])),
    }
