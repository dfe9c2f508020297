"""Examples -> one packed row, in pure torch and numpy: the same collator for every Transformers version."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import CollatorError
from .flattening import (
    IDS,
    IGNORED_LABEL,
    Array,
    Columns,
    as_numbers,
    concatenate,
    counted,
    document_lengths,
    given,
    integer,
    read,
    require_same_keys,
    require_visible_starts,
)

_TENSOR: dict[str, Callable[[Array], Any]] = {"pt": torch.tensor, "np": np.array}

TARGETS = ("labels", "label", "label_ids")
"""The names under which datasets hold one label per document."""


@dataclass
class DataCollatorWithFlattening:
    """Concatenate the examples of a mini-batch into one row without padding.

    Takes the options of the class of this name in Transformers 5.23 and returns the same batch. Pass options
    by keyword; as upstream, only ``return_tensors`` may be positional.

    Args:
        return_tensors: ``"pt"`` or ``"np"``.
        return_position_ids: return ``position_ids``, which restart in every document.
        separator_id: replaces the first label of every document. None leaves it, for token classification, where
            it is the first token's own.
        return_flash_attn_kwargs: return ``cu_seq_lens_q`` and ``_k``, ``max_length_q`` and ``_k``.
        return_seq_idx: return ``seq_idx``, the number of every token's document.
        position_ids_start: position id of every document's first token (2 for RoBERTa and its kin).
        pad_to_multiple_of: pad the row to a multiple of this many tokens. The padding is a document of its
            own: boundaries, ``seq_idx`` and ``max_length_*`` count it. Its labels are -100, its position ids
            count up from ``position_ids_start``, and what else the examples hold is 0 there.
        pad_token_id: the padding's ``input_ids``.
        loss_masks: columns that say which tokens are learned, such as TRL's ``("completion_mask",
            "assistant_masks")``: where one of them is 0 the label is -100. Not returned; those that the examples
            do not hold count for nothing.
        document_labels: ``labels`` (or ``label``, ``label_ids``) holds one class, number or list of numbers for each
            document instead of each token, for sequence classification.

    Raises:
        CollatorError: ``pad_to_multiple_of`` below 1, or another option that must be an integer and is none;
            ``loss_masks`` together with ``document_labels``.
    """

    return_tensors: str = "pt"
    return_position_ids: bool = True
    separator_id: int | None = -100
    return_flash_attn_kwargs: bool = False
    return_seq_idx: bool = False
    position_ids_start: int = 0
    pad_to_multiple_of: int | None = None
    pad_token_id: int = 0
    loss_masks: Sequence[str] = ()
    document_labels: bool = False

    def __post_init__(self) -> None:
        multiple = self.pad_to_multiple_of
        integers = ["position_ids_start"]
        integers += ["separator_id"] if self.separator_id is not None else []
        integers += ["pad_token_id"] if multiple is not None else []
        for name in integers:
            integer(name, getattr(self, name))
        if multiple is not None and integer("pad_to_multiple_of", multiple) < 1:
            raise CollatorError(f"pad_to_multiple_of: expected a positive number or None, found {multiple}.")
        if isinstance(self.loss_masks, str):
            raise CollatorError(f"loss_masks: expected names of columns, found {self.loss_masks!r}. Put it in a list.")
        if self.loss_masks and self.document_labels:
            raise CollatorError("loss_masks choose among labels of tokens: leave them out with document_labels=True.")

    def __call__(
        self,
        features: Iterable[Mapping[str, Any]],
        return_tensors: str | None = None,
        separator_id: int | None = None,
    ) -> dict[str, Any]:
        """One packed row of T tokens.

        Args:
            features: examples, each a mapping of lists, arrays or tensors with one number per token. A value
                of None counts as absent.

                - ``input_ids``: required.
                - ``labels``: default ``input_ids``. The first of every document becomes ``separator_id``. With
                  ``document_labels``: one per document (several where an example holds several), none in all
                  examples where there are none to give.
                - ``position_ids``: kept as they are; ``position_ids_start`` does not apply to them. Where one
                  is not its left neighbour's plus one, another document starts inside the example.
                - ``seq_lengths``: the lengths of the documents inside the example, as TRL's packed datasets have
                  them; ``position_ids`` are made of them.
                - ``attention_mask``: not returned. Tokens that it hides (0) are a tokenizer's padding: they
                  are dropped from the example, from all of its keys.
                - any other key (``completion_mask``, ``token_type_ids``, weights, ...): concatenated.
            return_tensors: instead of the option of this name, for this call.
            separator_id: likewise.

        Returns:
            ``input_ids``, ``labels``, ``position_ids``: int64 ``[1, T]``. ``seq_idx``: int32 ``[1, T]``.
            ``cu_seq_lens_q`` and ``_k``: int32 ``[documents + 1]``, equal. ``max_length_q`` and ``_k``: int.
            Further keys: ``[1, T]``, int64 (integers and booleans) or float32. With ``document_labels``:
            ``labels``, int64 or float32 ``[documents]``, or float32 ``[documents, numbers]``, the padding not
            counted; and, where the row is padded to a multiple, ``attention_mask`` int64 ``[1, T]``, 0 in the padding.

        Raises:
            CollatorError: no examples, or an empty one; ``input_ids`` missing; a key that only some examples
                hold, or that is not one number per token (such as a class label); position ids that hide
                where an example starts while neither ``cu_seq_lens`` nor ``seq_idx`` is returned; ``seq_lengths``
                that are not the documents' lengths; labels that are not one per document where they must be; an
                unknown ``return_tensors``; a ``separator_id`` that is no integer.
        """
        framework = self.return_tensors if return_tensors is None else return_tensors
        if not isinstance(framework, str) or framework not in _TENSOR:
            raise CollatorError(f"return_tensors: expected 'pt' or 'np', found {framework!r}.")
        separator = self.separator_id if separator_id is None else integer("separator_id", separator_id)
        if not isinstance(features, Iterable):
            raise CollatorError(f"expected a list of examples, found {type(features).__name__}.")
        targets: list[dict[str, Array]] = []
        if self.document_labels:
            features, targets = _without_targets(features)
        examples = [read(index, feature, self.position_ids_start) for index, feature in enumerate(features)]
        if not examples:
            raise CollatorError("expected at least one example, found an empty batch.")
        require_same_keys(examples)
        examples = [self._complete(example) for example in examples]
        documents = [document_lengths(example) for example in examples]
        labels = _one_per_document(targets, documents)
        tokens = sum(len(example["input_ids"]) for example in examples)
        padding = self._padding(tokens, examples[0])
        examples += padding
        documents += [document_lengths(example) for example in padding]
        if not (self.return_flash_attn_kwargs or self.return_seq_idx):
            require_visible_starts(examples)

        row = {key: concatenate([example[key] for example in examples]) for key in examples[0]}
        cu_seq_lens = np.cumsum([0, *(length for lengths in documents for length in lengths)])
        if "labels" in row:
            if separator is not None:
                row["labels"][cu_seq_lens[:-1]] = separator
            row["labels"][tokens:] = IGNORED_LABEL
        elif self.document_labels and self.pad_to_multiple_of is not None:
            row["attention_mask"] = (np.arange(len(row["input_ids"])) < tokens).astype(np.int64)
        return self._batch(row, labels, cu_seq_lens, _TENSOR[framework])

    def _complete(self, example: Columns) -> Columns:
        ids = example["input_ids"]
        complete = {"position_ids": self._positions(len(ids)), **example, "input_ids": ids}
        if not self.document_labels:
            complete.setdefault("labels", ids)
        learned = [complete.pop(name) != 0 for name in self.loss_masks if name in complete]
        if learned:
            complete["labels"] = np.where(np.all(learned, axis=0), complete["labels"], IGNORED_LABEL)
        return complete

    def _positions(self, length: int) -> Array:
        return counted([length], self.position_ids_start)

    def _padding(self, tokens: int, like: Columns) -> list[Columns]:
        """The padding as an example with the keys of ``like``, or nothing where none is needed."""
        length = -tokens % self.pad_to_multiple_of if self.pad_to_multiple_of else 0
        if not length:
            return []
        padding: Columns = {key: np.zeros(length, dtype=values.dtype) for key, values in like.items()}
        padding["input_ids"] = np.full(length, self.pad_token_id, dtype=np.int64)
        padding["position_ids"] = self._positions(length)
        return [padding]

    def _batch(
        self, row: Columns, labels: Array | None, cu_seq_lens: Array, tensor: Callable[[Array], Any]
    ) -> dict[str, Any]:
        lengths = np.diff(cu_seq_lens)
        arrays = {"input_ids": row["input_ids"][None]}
        if "labels" in row:
            arrays["labels"] = row["labels"][None]
        if labels is not None:
            arrays["labels"] = labels
        if self.return_position_ids:
            arrays["position_ids"] = row["position_ids"][None]
        if self.return_seq_idx:
            arrays["seq_idx"] = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[None]
        if self.return_flash_attn_kwargs:
            arrays["cu_seq_lens_q"] = arrays["cu_seq_lens_k"] = cu_seq_lens.astype(np.int32)
        arrays.update({key: values[None] for key, values in row.items() if key not in IDS})
        batch = {key: tensor(values) for key, values in arrays.items()}
        if self.return_flash_attn_kwargs:
            batch["max_length_q"] = batch["max_length_k"] = int(lengths.max())
        return batch


def _without_targets(features: Iterable[Any]) -> tuple[list[dict[str, Any]], list[dict[str, Array]]]:
    """The examples without their documents' labels, and those: under ``labels``, or nothing."""
    rest: list[dict[str, Any]] = []
    targets: list[dict[str, Array]] = []
    for index, feature in enumerate(features):
        found = given(index, feature)
        named = [name for name in TARGETS if name in found]
        if len(named) > 1:
            raise CollatorError(f"example {index}: labels under more than one name: {', '.join(named)}. Keep one.")
        values = [as_numbers(index, name, found.pop(name), "one label per document") for name in named]
        rest.append(found)
        targets.append({"labels": values[0]} if values else {})
    return rest, targets


def _one_per_document(targets: Sequence[dict[str, Array]], documents: Sequence[tuple[int, ...]]) -> Array | None:
    """Labels ``[documents]`` or ``[documents, numbers]``; None where no example has any."""
    if not any(targets):
        return None
    require_same_keys(targets)
    arrays = [np.atleast_1d(target["labels"]) for target in targets]
    if any(len(array) != len(lengths) for array, lengths in zip(arrays, documents)):
        # an example of one document with a list of numbers: several targets of that document
        single = [array[None] if len(lengths) == 1 else array for array, lengths in zip(arrays, documents)]
        for index, (array, lengths) in enumerate(zip(single, documents)):
            if len(array) != len(lengths) or array.ndim != 2 or array.shape[1:] != single[0].shape[1:]:
                raise CollatorError(
                    f"example {index}: labels of shape {targets[index]['labels'].shape} for {len(lengths)} documents. "
                    "Expected one number for each document, or in all examples equally many numbers for each."
                )
        arrays = single
    joined = np.concatenate(arrays)
    return joined.astype(np.float32 if joined.dtype.kind == "f" or joined.ndim == 2 else np.int64)
