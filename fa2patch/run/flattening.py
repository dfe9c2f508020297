"""``fa2patch run --collate``: flatten the padded training batches of a Trainer.

Every training step must give the same result as padded training. So the padding collator still makes every batch, and
then the tokens that its mask hides are dropped. No code but the model's may look at rows in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..data.collators import DataCollatorWithFlattening
from ..documents.names import IGNORED_LABEL
from ..errors import NotAModel
from ..patch.applying import status
from ..upstream.find_models import transformers_model
from ..upstream.transformers_names import COLLATORS
from .start import say

STANDARD = (
    "DataCollatorWithPadding", "DataCollatorForSeq2Seq", "DataCollatorForLanguageModeling", "DefaultDataCollator",
    "default_data_collator",
)  # fmt: skip

# Batches go through these methods of a Trainer on their way to the model.
LOOK_AT_BATCHES = (
    "compute_loss", "training_step", "get_train_dataloader", "get_batch_samples", "_prepare_inputs", "_prepare_input",
)  # fmt: skip


def collator_name(collator: Any) -> str:
    return str(getattr(collator, "__name__", type(collator).__name__))


def replaced(trainer: Any, methods: Iterable[str]) -> str:
    # The first of these methods that is neither Transformers' nor fa2patch's is named in a reason.
    for method in methods:
        home = str(getattr(getattr(trainer, method, None), "__module__", "transformers"))
        if home.split(".")[0] not in ("transformers", "fa2patch"):
            return f"{type(trainer).__name__}.{method} is not Transformers' own but {home}'s, and may look at rows"
    return ""


def why_trainer_stays_padded(trainer: Any) -> str:
    # Batches can be flattened if a standard collator makes them, if only a patched model that predicts the next token
    # looks at them, and if nothing splits them by rows on the way.
    try:
        model: Any = transformers_model(trainer.model)
    except NotAModel:
        return f"{type(trainer.model).__name__} holds no Transformers model"
    collator, args, accelerator = trainer.data_collator, trainer.args, trainer.accelerator
    name, home = collator_name(collator), getattr(collator, "__module__", type(collator).__module__)
    tensors, looks = getattr(collator, "return_tensors", "pt"), replaced(trainer, LOOK_AT_BATCHES)
    shared, dispatched = getattr(accelerator, "parallelism_config", None), _dispatched(trainer)
    return _first({
        f"{type(model).__name__} is not patched": status(model) is None,
        f"{type(model).__name__} does not predict the next token": not model.can_generate(),
        f"{name}, of {home}, is none of the collators that are known to pad and no more":
            home not in COLLATORS or name not in STANDARD,
        f"this {name} masks tokens at random (mlm=True)": getattr(collator, "mlm", False),
        f"this {name} makes no torch tensors (return_tensors={tensors!r})": tensors != "pt",
        looks: looks,
        "its compute_loss_func may look at rows": getattr(trainer, "compute_loss_func", None),
        f"DataParallel would cut the one row for {args.n_gpu} GPUs; start it with torchrun": args.n_gpu > 1,
        "context or sequence parallelism cuts rows up":
            getattr(shared, "cp_enabled", False) or getattr(shared, "sp_enabled", False),
        "split_batches=True cuts one batch up for all ranks, by rows":
            args.world_size > 1 and getattr(accelerator, "split_batches", False),
        "one rank reads batches and cuts them up for all, by rows (dispatch_batches)":
            args.world_size > 1 and dispatched,
        "torch_compile needs documents' lengths, which accelerate's dispatch_batches cuts as if they were rows":
            dispatched and getattr(args, "torch_compile", False),
    })  # fmt: skip


def why_batch_stays_padded(padded: Mapping[str, Any]) -> str:
    # With padding on the left, the last padding token learns to predict the first real token, so rows must be padded on
    # the right.
    for key in ("input_ids", "labels", "attention_mask"):
        if not isinstance(padded.get(key), torch.Tensor):
            return f"it has no {key}"
    shape, mask = padded["input_ids"].shape, padded["attention_mask"]
    for key, values in padded.items():
        if getattr(values, "shape", None) != shape or len(shape) != 2:
            return f"its {key} is not one for each token"
    lengths = mask.sum(1, keepdim=True)
    return _first({
        "it has position_ids of its own": "position_ids" in padded,
        "its rows are not padded on the right (tokenizer.padding_side='right'), or not only there":
            not lengths.all() or (mask != (torch.arange(shape[1]) < lengths)).any(),
        f"padding has labels that are not {IGNORED_LABEL}, so the padded run learns to predict padding":
            (padded["labels"][mask == 0] != IGNORED_LABEL).any(),
    })  # fmt: skip


def _first(reasons: Mapping[str, Any]) -> str:
    return next((why for why, holds in reasons.items() if holds), "")


def _dispatched(trainer: Any) -> bool:
    # By default accelerate's dispatcher slices batches of iterable datasets, on one rank too.
    asked = getattr(trainer.accelerator, "dispatch_batches", None)
    return isinstance(trainer.train_dataset, torch.utils.data.IterableDataset) if asked is None else bool(asked)


def flattening(trainer: Any) -> Flattening:
    # Up to 5.9, Trainer divides the loss by the number of all labels that are not -100. That counts a row's first
    # label, although no token predicts it. First labels are kept there so that the loss equals that of padded training.
    # The patched model drops them. From 5.10 on, Trainer does not count first labels.
    counts_all = not getattr(trainer, "_loss_shifts_labels", False) and getattr(trainer, "label_smoother", None) is None
    return Flattening(trainer.data_collator, keep_first=counts_all, lengths=not _dispatched(trainer))


class Flattening:
    """A collator that pads a batch, and flattens it if that computes the same. DataLoader workers can pickle it."""

    def __init__(self, padding: Any, keep_first: bool, lengths: bool) -> None:
        self.padding, self.said = padding, False
        separator = None if keep_first else IGNORED_LABEL
        self.flatten = DataCollatorWithFlattening(separator_id=separator, return_flash_attn_kwargs=lengths)

    def __call__(self, features: list[Any]) -> Mapping[str, Any]:
        padded: Mapping[str, Any] = self.padding(features)
        why = why_batch_stays_padded(padded)
        if not why:
            return self.flatten(dict(zip(padded, row)) for row in zip(*padded.values()))
        worker = torch.utils.data.get_worker_info()
        if not self.said and (worker is None or worker.id == 0):
            say(f"a batch stays padded, and others like it: {why}.")
        self.said = True
        return padded
