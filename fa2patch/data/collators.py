"""Collator that packs examples into one row.

It uses only torch and numpy, so it is the same for every Transformers version.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..documents.find import counts_anew
from ..documents.names import IGNORED_LABEL, REAL
from ..documents.row_shape import RowShape
from ..errors import CollatorError
from .columns import (
    IDS,
    LABELS,
    Array,
    Columns,
    Flat,
    as_numbers,
    concatenate,
    document_lengths,
    ends,
    integer,
    present,
    read_examples,
    require_same_keys,
    restarting,
    shown,
    starts,
)
from .loss_weights import check_columns, check_option, weighted

# TRL marks the tokens that are learned in these columns.
TRLS_MASKS = ("completion_mask", "assistant_masks")


@dataclass
class DataCollatorWithFlattening:
    """Concatenate the examples of a mini-batch into one row without padding.

    The collator takes the options of the class of the same name in Transformers 5.23 and returns the same batch.
    Pass options by keyword: upstream accepts only ``return_tensors`` as a positional argument.

    Args:
        return_tensors: ``"pt"`` or ``"np"``.
        return_position_ids: Return ``position_ids``, which restart in every document.
        separator_id: Replaces the first label of every document. Pass None to keep it, for example in token
            classification, where the first label belongs to the first token.
        return_flash_attn_kwargs: Return ``cu_seq_lens_q``, ``cu_seq_lens_k``, ``max_length_q`` and ``max_length_k``.
        return_seq_idx: Return ``seq_idx``, the document number of every token.
        position_ids_start: Position id of every document's first token (2 for RoBERTa and related models).
        pad_to_multiple_of: Pad the row to a multiple of this many tokens; with ``"power"`` to the next power of two,
            and with ``"eighth"`` to the next of the eight lengths that divide the way between two powers of two evenly,
            so that rows have few lengths. The padding is a document of its own:
            the boundaries, ``seq_idx`` and ``max_length_*`` include it. Its labels are -100, its position ids
            count up from ``position_ids_start``, and all other columns are 0. ``real_tokens`` tell a patched model
            which tokens are padding: its router losses do not count them.
        pad_token_id: ``input_ids`` of the padding.
        loss_masks: Columns that select the tokens in the loss, such as TRL's ``("completion_mask",
            "assistant_masks")``. The label is -100 where any of them is 0, and they hold nothing but 0 and 1. These
            columns are not returned, and columns that the examples do not have are ignored.
        document_labels: ``labels`` (or ``label``, ``label_ids``) holds one class, number or list of numbers per
            document instead of one label per token, for sequence classification.
        loss_weights: With ``"document"``, every document has the same weight in the loss of a patched causal LM,
            however many tokens it has. With ``"token"``, the examples' column ``loss_weights`` says how much each token
            counts there: the loss is the sum of weight x cross entropy, divided by the number of tokens in the loss,
            as ms-swift computes it from ``loss_scale``. By default every token has the same weight.
        max_documents: ``cu_seq_lens_*`` have as many entries in every batch, for a row of at most so many documents:
            the last end is repeated, for documents without tokens. The padding of ``pad_to_multiple_of`` does not
            count: there is always one entry more for it. Needs ``return_flash_attn_kwargs``.
        longest_document: ``max_length_*`` of every batch, at least the longest document's length, padding included;
            with ``"power"`` or ``"eighth"`` that length rounded up. Needs ``return_flash_attn_kwargs``. If
            ``pad_to_multiple_of`` and this are the tokens of a full row, and ``max_documents`` the most that a row
            holds, every batch has the same shapes and numbers, and a compiled model one graph.

    Attributes:
        empty: Number of examples that it has left out because they have no tokens, or none that their
            ``attention_mask`` shows. Each worker of a DataLoader counts its own.

    Raises:
        CollatorError: ``pad_to_multiple_of`` or ``longest_document`` is neither a positive integer nor one of these
            words, ``max_documents`` is below 1, another option that must be an integer is not one,
            ``loss_masks`` is a string, ``loss_weights`` is unknown, ``document_labels`` is used together with one of
            these two or with ``max_documents``, or an option needs ``return_flash_attn_kwargs``.
    """

    return_tensors: str = "pt"
    return_position_ids: bool = True
    separator_id: int | None = -100
    return_flash_attn_kwargs: bool = False
    return_seq_idx: bool = False
    position_ids_start: int = 0
    pad_to_multiple_of: int | str | None = None
    pad_token_id: int = 0
    loss_masks: Sequence[str] = ()
    document_labels: bool = False
    loss_weights: str | None = None
    max_documents: int | None = None
    longest_document: int | str | None = None
    empty: int = field(default=0, init=False, repr=False, compare=False)
    _said: bool = field(default=False, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.framework(None)
        integer("position_ids_start", self.position_ids_start)
        if self.separator_id is not None:
            integer("separator_id", self.separator_id)
        if self.pad_to_multiple_of is not None:
            integer("pad_token_id", self.pad_token_id)
        self._shape()  # which checks its options itself
        for name in ("max_documents", "longest_document"):
            if getattr(self, name) is not None and not self.return_flash_attn_kwargs:
                raise CollatorError(f"{name} is of lengths: set return_flash_attn_kwargs=True, too.")
        if self.max_documents is not None and self.document_labels:
            raise CollatorError("document_labels are as many as the documents: leave max_documents out.")
        if not isinstance(self.loss_masks, Iterable) or isinstance(self.loss_masks, str):
            raise CollatorError(
                f"loss_masks: expected names of columns, found {shown(self.loss_masks)}. Put it in a list."
            )
        if self.loss_masks and self.document_labels:
            raise CollatorError("loss_masks choose among labels of tokens: leave them out with document_labels=True.")
        check_option(self.loss_weights)
        if self.loss_weights and self.document_labels:
            raise CollatorError("loss_weights are of labels of tokens: leave them out with document_labels=True.")

    def _shape(self) -> RowShape:
        return RowShape(self.pad_to_multiple_of, self.max_documents, self.longest_document, error=CollatorError)

    def __call__(
        self, features: Iterable[Mapping[str, Any]], return_tensors: str | None = None, separator_id: int | None = None
    ) -> dict[str, Any]:
        """Concatenate the examples into one packed row of T tokens.

        Args:
            features: Examples. Each is a mapping of lists, arrays or tensors with one number per token. A value of
                None counts as absent. Examples without tokens are left out and counted, as Transformers leaves them
                out from 5.24 on.

                - ``input_ids``: Required.
                - ``labels``: Default to ``input_ids``. The first label of every document becomes ``separator_id``.
                  With ``document_labels``, an example has one label for each of its documents, and the labels may
                  be absent from all examples.
                - ``position_ids``: Kept as they are; ``position_ids_start`` does not apply to them. A new document
                  starts inside the example wherever an id is not its left neighbour's plus one.
                - ``seq_lengths``: Lengths of the documents inside the example, as in TRL's packed datasets.
                  ``position_ids`` are computed from them.
                - ``attention_mask``: Not returned. Tokens whose mask is 0 are padding from a tokenizer and are
                  dropped from all columns of the example.
                - ``loss_weights``: With ``loss_weights="token"``, a finite number for each token. It belongs to the
                  label at the same place. Where it is 0, the token is not in the loss and is not counted.
                - Any other key (``completion_mask``, ``token_type_ids``, weights, ...): Concatenated.
            return_tensors: Overrides the option ``return_tensors`` for this call.
            separator_id: Overrides the option ``separator_id`` for this call.

        Returns:
            ``input_ids``, ``labels`` and ``position_ids``: int64 ``[1, T]``. ``seq_idx``: int32 ``[1, T]``.
            ``cu_seq_lens_q`` and ``cu_seq_lens_k``: int32 ``[documents + 1]``, equal; with ``max_documents``, int32
            ``[max_documents + 1]``, or ``[max_documents + 2]`` if there may be padding. ``max_length_q`` and
            ``max_length_k``: int. Other keys: ``[1, T]``, int64 (from integers and booleans) or float32. With
            ``document_labels``, ``labels`` is int64 or float32 ``[documents]``, or float32 ``[documents, numbers]``,
            without an entry for the padding. With ``pad_to_multiple_of``, ``real_tokens`` is int64 ``[1, T]``, 0 in
            the padding and 1 elsewhere, also if a row needs none. With ``loss_weights``: ``labels`` have one entry,
            which is no token, for each document or for each token in the loss; ``loss_labels``, int64 ``[1, T]``, are
            the labels, and ``loss_weights``, float32 ``[1, T]``, their weights.

        Raises:
            CollatorError: There are no examples, none has tokens, ``input_ids`` are missing, a key is in only
                some of the examples or is not one number per token (such as a class label), position ids hide where
                an example starts while neither ``cu_seq_lens_*`` nor ``seq_idx`` is returned, ``seq_lengths`` are
                not the documents' lengths, ``document_labels`` is set and the labels are not one per document, a column
                of ``loss_masks`` holds other numbers than 0 and 1, ``loss_weights`` are missing or not finite, the row
                has more documents than ``max_documents`` or one that is longer than ``longest_document``, a float is
                too large for float32, ``return_tensors`` is unknown, or ``separator_id`` is not an integer.
        """
        framework = self.framework(return_tensors)
        separator = self.separator_id if separator_id is None else integer("separator_id", separator_id)
        shape = self._shape()  # the options may be set later, too
        examples = present(features)
        targets = _labels_taken_out(examples) if self.document_labels else []
        flat = read_examples(examples, self.position_ids_start)
        self.empty += len(examples) - len(flat.kept)
        targets = [targets[number] for number in flat.kept] if targets else []
        tokens = sum(flat.lengths)
        check_columns(flat, self.loss_weights)
        self._add_labels(flat)
        row, lengths = self._padded(flat, shape.length(tokens) - tokens)

        if "position_ids" in row:
            documents = document_lengths(row["position_ids"], lengths)
            if not (self.return_flash_attn_kwargs or self.return_seq_idx):
                _require_visible_starts(row["position_ids"], lengths, flat.kept)
        else:
            documents = lengths
            row["position_ids"] = restarting(lengths, self.position_ids_start)
        held = len(documents) - (tokens < sum(lengths))
        if self.max_documents is not None and held > self.max_documents:
            raise CollatorError(
                f"max_documents={self.max_documents}, but a row has {held} documents. Raise max_documents to the most "
                "that a row may hold (of a packing.plan: max(map(len, plan))), or put fewer into a row."
            )

        if self.document_labels:
            labels = _labels_of_documents(targets, documents, lengths, flat.kept)
        else:
            labels = row["labels"]
            if separator is not None:
                first = starts(documents)
                self._say_what_is_lost(labels, row["input_ids"], first[first < tokens])
                labels[first] = separator
            labels[tokens:] = IGNORED_LABEL
            labels = labels[None]

        # the keys come in the order of Transformers' collator
        arrays = {"input_ids": row["input_ids"][None]}
        if labels is not None:
            arrays["labels"] = labels
        if self.return_position_ids:
            arrays["position_ids"] = row["position_ids"][None]
        if self.return_seq_idx:
            arrays["seq_idx"] = np.repeat(np.arange(len(documents), dtype=np.int32), documents)[None]
        if self.return_flash_attn_kwargs:
            arrays["cu_seq_lens_q"] = shape.ends(documents)
            arrays["cu_seq_lens_k"] = arrays["cu_seq_lens_q"].copy()
        arrays.update({key: values[None] for key, values in row.items() if key not in IDS})
        if self.pad_to_multiple_of is not None:  # every batch of a loader has the same keys
            arrays[REAL] = (np.arange(sum(lengths)) < tokens).astype(np.int64)[None]
        if self.loss_weights:
            found = weighted(row, documents, self.loss_weights)
            arrays.update({key: values[None] for key, values in found.items()})
        batch = of_framework(framework, arrays)  # the arrays share no memory with the examples or with each other
        if self.return_flash_attn_kwargs:
            batch["max_length_q"] = batch["max_length_k"] = shape.longest([max(documents)])
        return batch

    def with_first_labels(self) -> DataCollatorWithFlattening:
        """Return this collator with ``separator_id=None``. A Trainer of a patched token classifier uses that one."""
        made = copy.copy(self)
        made.separator_id = None
        return made

    def framework(self, return_tensors: str | None) -> str:
        """Return ``"pt"`` or ``"np"``: the argument of a call, or the option if it is None.

        Raises:
            CollatorError: It is something else.
        """
        framework = self.return_tensors if return_tensors is None else return_tensors
        if framework not in ("pt", "np"):
            advice = "" if isinstance(framework, str) else " All options are named, and none of them is a tokenizer."
            raise CollatorError(f"return_tensors: expected 'pt' or 'np', found {shown(framework)}.{advice}")
        return framework

    def _say_what_is_lost(self, labels: Array, ids: Array, first: Array) -> None:
        # In a causal LM a document's first label is its own token, or it is ignored. Any other one is worth a warning.
        lost = first[(labels[first] != ids[first]) & (labels[first] != IGNORED_LABEL)]
        if len(lost) and not self._said:
            self._said = True
            warnings.warn(
                "labels: the first one of each document becomes separator_id, because in a causal LM no token predicts "
                f"it. Here one is {labels[lost[0]]} for the token {ids[lost[0]]}: if labels are of their own "
                "tokens (a token classifier, masked tokens), keep it with separator_id=None.",
                UserWarning,
                stacklevel=3,
            )

    def _add_labels(self, flat: Flat) -> None:
        # Labels of documents were taken out of the examples before.
        columns = flat.columns
        if not self.document_labels and "labels" not in columns:
            unread = [name for name in TRLS_MASKS if name in columns and name not in self.loss_masks]
            if unread:
                warnings.warn(
                    f"The examples have {' and '.join(unread)} and no labels: every token is learned, also those of "
                    f"prompts. Pass loss_masks={unread!r} to learn what the column marks, or leave the column out.",
                    UserWarning,
                    stacklevel=3,
                )
            columns["labels"] = columns["input_ids"].copy()
        selected = [_selected(name, columns.pop(name), flat) for name in self.loss_masks if name in columns]
        if selected:
            columns["labels"] = np.where(np.all(selected, axis=0), columns["labels"], IGNORED_LABEL)

    def _padded(self, flat: Flat, length: int) -> tuple[Columns, list[int]]:
        # The lengths are those of the examples, and last that of the padding, if there is any.
        if not length:
            return flat.columns, flat.lengths
        row = {key: np.concatenate([values, np.zeros(length, values.dtype)]) for key, values in flat.columns.items()}
        row["input_ids"][-length:] = self.pad_token_id
        if "position_ids" in row:
            row["position_ids"][-length:] = restarting([length], self.position_ids_start)
        return row, [*flat.lengths, length]


def of_framework(framework: str, arrays: Columns) -> dict[str, Any]:
    # asarray copies nothing, and respects torch.set_default_device, as from_numpy does not
    return {key: torch.asarray(values) if framework == "pt" else values for key, values in arrays.items()}


def _require_visible_starts(position_ids: Array, lengths: Sequence[int], kept: Sequence[int]) -> None:
    # `kept` are the numbers of the examples in the batch. The padding comes last and has none.
    first = ends(lengths)[:-1]
    left, right = position_ids[first - 1], position_ids[first]
    hidden = np.flatnonzero(~counts_anew(right, left))
    if len(hidden):
        at = hidden[0]
        number = kept[at + 1] if at + 1 < len(kept) else kept[-1] + 1
        raise CollatorError(
            f"position_ids go on from {left[at]} to {right[at]} where example {number} (or the padding) "
            "starts, which hides that start. Let them restart, or set return_flash_attn_kwargs=True."
        )


def _selected(name: str, values: Array, flat: Flat) -> Array:
    # A fraction would give its token the whole weight.
    selected: Array = values == 1
    (wrong,) = np.nonzero(~selected & (values != 0))
    if len(wrong):
        raise CollatorError(
            f"example {flat.number_of(wrong[0])}: the loss mask {name} holds {values[wrong[0]]}. Expected 0 and 1, "
            "because a mask selects the tokens in the loss. Round it, or pass weights as the column loss_weights, with "
            'loss_weights="token".'
        )
    return selected


def _labels_taken_out(examples: Sequence[dict[str, Any]]) -> list[Columns]:
    targets: list[Columns] = [{} for _ in examples]
    for index, example in enumerate(examples):
        names = [name for name in LABELS if name in example]
        if len(names) > 1:
            raise CollatorError(f"example {index}: labels under more than one name: {', '.join(names)}. Keep one.")
        for name in names:
            targets[index]["labels"] = as_numbers(index, name, example.pop(name), "one label per document")
    return targets


def _labels_of_documents(
    targets: Sequence[Columns], documents: Sequence[int], lengths: Sequence[int], kept: Sequence[int]
) -> Array | None:
    # Labels are [documents] or [documents, numbers], or None if no example has any. `lengths` may end with that of the
    # padding, which has no labels.
    if not any(targets):
        return None
    require_same_keys(targets)
    counts = np.diff(np.searchsorted(ends(documents), ends(lengths)), prepend=-1).tolist()  # documents of each example
    arrays = [np.atleast_1d(target["labels"]) for target in targets]
    if any(len(array) != count for array, count in zip(arrays, counts)):
        # If an example has one document, its list of numbers holds several targets of that document.
        arrays = [array[None] if count == 1 else array for array, count in zip(arrays, counts)]
        for index, (array, count) in enumerate(zip(arrays, counts)):
            if len(array) != count or array.ndim != 2 or array.shape[1:] != arrays[0].shape[1:]:
                raise CollatorError(
                    f"example {kept[index]}: labels of shape {targets[index]['labels'].shape} for {count} documents. "
                    "Expected one number for each document, or in all examples equally many numbers for each."
                )
    joined = concatenate("labels", [array if array.dtype.kind == "f" else array.astype(np.int64) for array in arrays])
    return joined.astype(np.float32 if joined.ndim == 2 else joined.dtype, copy=False)
