"""``fa2patch run --collate``: a Trainer's padded training batches, laid end to end.

What is safe: the result must be the padded run's, step by step. So the padding collator itself makes every batch, as it
would have, and its rows lose what their mask hides; and nobody but the model may look at them in between. The rest of
this file says what that asks of a Trainer (:func:`why_not`) and of a batch (:class:`Flattening`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..data.collators import DataCollatorWithFlattening
from ..errors import NotAModel
from ..patch.applying import status
from ..patch.unwrap import transformers_model
from .saying import say

STANDARD = (
    "DataCollatorWithPadding", "DataCollatorForSeq2Seq", "DataCollatorForLanguageModeling", "DefaultDataCollator",
    "default_data_collator",
)  # fmt: skip
HOME = "transformers.data.data_collator"

LOOK_AT_BATCHES = (
    "compute_loss", "training_step", "get_train_dataloader", "get_batch_samples", "_prepare_inputs", "_prepare_input",
)  # fmt: skip
"""Methods of a Trainer that batches go through on their way to the model."""

_IGNORED = -100


def name(collator: Any) -> str:
    return str(getattr(collator, "__name__", type(collator).__name__))


def replaced(trainer: Any, methods: Iterable[str]) -> str:
    """Which of these methods are not Transformers' own, in words; empty where all are."""
    for method in methods:
        found = getattr(trainer, method, None)
        home = str(getattr(found, "__module__", "transformers"))
        if home.split(".")[0] not in ("transformers", "fa2patch"):
            return f"{type(trainer).__name__}.{method} is not Transformers' own but {home}'s, and may look at rows"
    return ""


def why_not(trainer: Any) -> str:
    """Why the training batches of this Trainer stay padded; empty where they can be flattened.

    They can be where a standard collator makes them, a patched model that predicts the next token is all that looks at
    them, and nobody cuts a batch up by its rows on its way.
    """
    collator, args = trainer.data_collator, trainer.args
    try:
        model = transformers_model(trainer.model)
    except NotAModel:
        return f"{type(trainer.model).__name__} holds no Transformers model"
    if status(model) is None:
        return f"{type(model).__name__} is not patched"
    if not model.can_generate():
        return f"{type(model).__name__} does not predict the next token"
    if _home(collator) != HOME or name(collator) not in STANDARD:
        return f"{name(collator)}, of {_home(collator)}, is none of the collators that are known to pad and no more"
    if getattr(collator, "mlm", False):
        return f"this {name(collator)} masks tokens at random (mlm=True)"
    if getattr(collator, "return_tensors", "pt") != "pt":
        return f"this {name(collator)} makes no torch tensors (return_tensors={collator.return_tensors!r})"
    found = replaced(trainer, LOOK_AT_BATCHES)
    if found:
        return found
    if getattr(trainer, "compute_loss_func", None) is not None:
        return "its compute_loss_func may look at rows"
    if args.n_gpu > 1:
        return f"DataParallel would cut the one row for {args.n_gpu} GPUs; start it with torchrun"
    return _cut_up(trainer)


def _home(collator: Any) -> str:
    return str(getattr(collator, "__module__", type(collator).__module__))


def _cut_up(trainer: Any) -> str:
    accelerator, args = trainer.accelerator, trainer.args
    shared = getattr(accelerator, "parallelism_config", None)
    if any(getattr(shared, kind, False) for kind in ("cp_enabled", "sp_enabled")):
        return "context or sequence parallelism cuts rows up"
    if args.world_size > 1 and getattr(accelerator, "split_batches", False):
        return "split_batches=True cuts one batch up for all ranks, by rows"
    if _dispatched(trainer) and args.world_size > 1:
        return "one rank reads batches and cuts them up for all, by rows (dispatch_batches)"
    if _dispatched(trainer) and getattr(args, "torch_compile", False):
        return (
            "torch_compile needs documents' lengths, and accelerate's dispatch_batches cuts those as if they were rows"
        )
    return ""


def _dispatched(trainer: Any) -> bool:
    """Whether accelerate's dispatcher slices every batch (by default that of an iterable dataset, on one rank too)."""
    asked = getattr(trainer.accelerator, "dispatch_batches", None)
    return isinstance(trainer.train_dataset, torch.utils.data.IterableDataset) if asked is None else bool(asked)


def flattening(trainer: Any) -> Flattening:
    """The collator for a Trainer of which :func:`why_not` says nothing.

    Up to 5.9 Trainer divides the loss by all labels that are not -100, a row's first among them, though no token
    predicts it. For the padded run's loss they are kept; the patched model drops them. From 5.10 on none is counted.
    """
    counts_all = not getattr(trainer, "_loss_shifts_labels", False) and getattr(trainer, "label_smoother", None) is None
    return Flattening(trainer.data_collator, keep_first=counts_all, lengths=not _dispatched(trainer))


class Flattening:
    """A padding collator, its rows laid end to end where that computes the same; pickled to DataLoader workers.

    Args:
        padding: the collator that pads.
        keep_first: leave every document's first label as it is; the patched model drops it.
        lengths: return ``cu_seq_lens_*`` and ``max_length_*`` too.
    """

    def __init__(self, padding: Any, keep_first: bool, lengths: bool) -> None:
        self.padding, self.keep_first = padding, keep_first
        self.flatten = DataCollatorWithFlattening(return_flash_attn_kwargs=lengths)
        self.said = False

    def __call__(self, features: Any) -> Any:
        """One row ``[1, T]`` of the batch's real tokens; the padded batch ``[B, L]`` where that is not the same."""
        padded = self.padding(features)
        why = unlike(padded)
        if why:
            self._say(why)
            return padded
        rows = [{key: values[row] for key, values in padded.items()} for row in range(len(padded["input_ids"]))]
        batch = self.flatten(rows)
        if self.keep_first:
            lengths = padded["attention_mask"].sum(1)
            batch["labels"][0, lengths.cumsum(0) - lengths] = padded["labels"][:, 0]
        return batch

    def _say(self, why: str) -> None:
        worker = torch.utils.data.get_worker_info()
        if not self.said and (worker is None or worker.id == 0):
            say(f"a batch stays padded, and others like it: {why}.")
        self.said = True


def unlike(padded: Any) -> str:
    """Why a padded batch's documents, laid end to end, would not train as the batch does; empty where they would.

    Rows must be padded on the right: of one that is padded on the left, the padding's last token learns to predict the
    first real one. No label may stand on padding, and everything must be one for each token.
    """
    for key in ("input_ids", "labels", "attention_mask"):
        if not isinstance(padded.get(key), torch.Tensor):
            return f"it has no {key}"
    shape, mask = padded["input_ids"].shape, padded["attention_mask"]
    other = [key for key, values in padded.items() if getattr(values, "shape", None) != shape or len(shape) != 2]
    if other:
        return f"its {other[0]} is not one for each token"
    if "position_ids" in padded:
        return "it has position_ids of its own"
    if not ((mask == 0) | (mask == 1)).all() or not mask[:, 0].all() or (mask[:, 1:] > mask[:, :-1]).any():
        return "its rows are not padded on the right (tokenizer.padding_side='right'), or not only there"
    if (padded["labels"][mask == 0] != _IGNORED).any():
        return f"padding has labels that are not {_IGNORED}, so the padded run learns to predict padding"
    return ""
