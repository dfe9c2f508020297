"""Labels that Trainer uses outside of the model: those that cross a boundary are ignored there, too.

Trainer counts labels before a forward (``num_items_in_batch``), and keeps them from the model if the loss is computed
outside of it: label smoothing, ``compute_loss_func``, a ``compute_loss`` of one's own. Metrics get its labels, too.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .._types import Call, Function
from ..binding import bind
from ..documents import given_boundaries
from ..documents.names import IGNORED_LABEL, LABELS, LOSS_LABELS, TOKENS
from ..errors import Fa2PatchError, NotAModel
from ..upstream import attached, inspecting
from ..upstream.calls import batch_shape, passed
from ..upstream.engines import row_part
from ..upstream.find_documents import packed_mask_of
from ..upstream.find_models import transformers_model
from ..upstream.labels import inside_documents, kept_logits
from ..upstream.step import MARK, ROLE, Patched
from ..upstream.transformers_names import TRAINER

LOADERS = ("get_train_dataloader", "get_eval_dataloader", "get_test_dataloader")

# This says for each Trainer whether its count leaves out the first label of each row. The keys are ids, because a
# Trainer that is a dataclass has no hash.
_leave_first_out = WeakIdKeyDictionary()


def mend_labels(module: ModuleType, patch: Patched) -> None:
    trainer = getattr(module, TRAINER, None)
    made = {"_prepare_inputs": _prepared, "_get_num_items_in_batch": _counted, **dict.fromkeys(LOADERS, _loading)}
    for name, make in made.items():
        if trainer is not None and name in vars(trainer):
            bind(trainer, name, make, patch)


def _prepared(original: Function) -> Function:
    # Every batch goes through this method, in training and in evaluation.

    @functools.wraps(original)
    def _prepare_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        return without_first_labels(self.model, original(self, *args, **kwargs))

    return _prepare_inputs


def _counted(original: Function) -> Function:
    # Padded training is the measure. Up to Transformers 5.9 it counts the first label of every document, although
    # nothing predicts it, and so must packed rows. From 5.10 on it leaves out the first label of every row. Releases
    # from 4.46 to 4.56 count all labels in another method.

    @functools.wraps(original)
    def _get_num_items_in_batch(self: Any, batch_samples: Any, *args: Any, **kwargs: Any) -> Any:
        def number(batches: Any) -> Any:
            return original(self, batches, *args, **kwargs)

        if _patch_of(self.model) is not None and self not in _leave_first_out:
            row = torch.ones(1000, 2, dtype=torch.int64)  # several: the number may be divided by that of the devices
            without = row.masked_fill(torch.tensor([True, False]), -100)
            _leave_first_out[self] = bool(number([{"labels": row}]) == number([{"labels": without}]))
        if self in _leave_first_out and _leave_first_out[self]:
            return number([without_first_labels(self.model, batch) for batch in batch_samples])
        return number([_as_given(batch) for batch in batch_samples])

    return _get_num_items_in_batch


def _loading(original: Function) -> Function:
    # A flattening collator drops the first label of each document. A token classifier or a masked LM learns that label,
    # so the collator keeps it there.

    @functools.wraps(original)
    def get_dataloader(self: Any, *args: Any, **kwargs: Any) -> Any:
        patch, collator = _patch_of(self.model), self.data_collator
        drops_first = getattr(collator, "separator_id", None) == IGNORED_LABEL
        if patch is not None and drops_first and not patch.model.__dict__[ROLE].predicts_the_next:
            if hasattr(collator, "with_first_labels"):
                self.data_collator = collator.with_first_labels()
            else:
                warnings.warn(
                    f"{type(collator).__module__}.{type(collator).__name__} drops the first label of each document, "
                    f"which {type(patch.model).__name__} would learn. Use fa2patch.DataCollatorWithFlattening.",
                    UserWarning,
                    stacklevel=2,
                )
        return original(self, *args, **kwargs)

    return get_dataloader


def without_first_labels(model: Any, batch: Any) -> Any:
    # A dense batch is returned as it is. So is a malformed one: the forward says what is wrong, if it gets these
    # columns.
    call = dict(batch) if isinstance(batch, Mapping) else {}
    patch = _patch_of(model) if passed(call, LABELS) and passed(call, TOKENS) else None
    if patch is None or call.get(LOSS_LABELS) is not None:  # then labels count documents or tokens
        return batch
    with contextlib.suppress(Fa2PatchError):
        inside = _inside_documents(patch, call)
        if inside:
            made = copy.copy(batch)
            made.update(inside)
            return made
    return batch


def _inside_documents(patch: Patched, call: Call) -> Call:
    # The given labels stay attached to the new ones, for a count that includes those that cross a boundary.
    model = patch.model
    role = model.__dict__[ROLE]
    if role.pools or not role.predicts_the_next or row_part(model, call) is not None:
        return {}
    shape, _ = batch_shape(call)
    mask = packed_mask_of(
        given_boundaries.translated(call, inspecting.parameter_names(type(model).forward), shape), patch
    )
    if mask is None:
        return {}
    return {
        name: attached.attach(
            inside_documents(labels, mask.boundaries, name, shape, kept_logits(call)),
            attached.Piece(attached.GIVEN, labels),
        )
        for name, labels in passed(call, LABELS).items()
    }


def _as_given(batch: Any) -> Any:
    # An evaluation counts labels after `without_first_labels`, so the earlier ones are restored.
    call = dict(batch) if isinstance(batch, Mapping) else {}
    pieces = {name: getattr(call.get(name), attached.GIVEN, None) for name in LABELS}
    found = {name: piece.content for name, piece in pieces.items() if piece is not None}
    return {**call, **found} if found else batch


def _patch_of(model: Any) -> Patched | None:
    try:
        patch: Patched | None = transformers_model(model).__dict__.get(MARK)
    except NotAModel:
        return None
    return patch
