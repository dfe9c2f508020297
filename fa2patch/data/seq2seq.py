"""Collator that packs examples for an encoder-decoder: sources into one row, targets into another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..documents.names import IGNORED_LABEL, OF_TARGETS
from ..errors import CollatorError
from .collators import DataCollatorWithFlattening
from .columns import present, shown

_SOURCE, _TARGET, _INPUTS = ("input_ids", "attention_mask"), "labels", "decoder_input_ids"

# what an encoder of sounds or pictures takes: one entry for each example, all of one shape
_MEDIA = ("input_features", "pixel_values")


@dataclass
class DataCollatorForSeq2Seq:
    """Concatenate the examples of a mini-batch into a row of sources and a row of targets, both without padding.

    It takes the place of the class of the same name in Transformers, for a model that ``fa2patch.apply`` has patched.
    Source i belongs to target i. Pass options by keyword.

    Args:
        model: The model, or None. With it, ``decoder_input_ids`` are made of the labels by
            ``model.prepare_decoder_input_ids_from_labels``, as Trainer's label smoothing needs them, which takes labels
            out of the batch.
        label_pad_token_id: Labels of this value at the end of an example's labels are padding and are left out.
        return_flash_attn_kwargs: Return the ends and the longest lengths of both rows, so that nothing is read from
            the device.
        pad_to_multiple_of: Pad both rows, as :class:`fa2patch.DataCollatorWithFlattening` does, or each by its own of
            two values, of the sources and of the targets; the padding of one row belongs to that of the other. Needs
            ``return_flash_attn_kwargs``.
        pad_token_id: ``input_ids`` of the sources' padding.
        max_documents: The most examples of a batch; ``cu_seq_lens_*`` then have as many entries in every batch. Needs
            ``return_flash_attn_kwargs``.
        longest_source, longest_target: ``max_length_*`` of every batch. Both need ``return_flash_attn_kwargs``.
        return_tensors: ``"pt"`` or ``"np"``.

    Raises:
        CollatorError: An option is none of its values.
    """

    model: Any = None
    label_pad_token_id: int = IGNORED_LABEL
    return_flash_attn_kwargs: bool = True
    pad_to_multiple_of: int | str | tuple[int | str, int | str] | None = None
    pad_token_id: int = 0
    max_documents: int | None = None
    longest_source: int | str | None = None
    longest_target: int | str | None = None
    return_tensors: str = "pt"
    _of: tuple[DataCollatorWithFlattening, DataCollatorWithFlattening] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.pad_to_multiple_of is not None and not self.return_flash_attn_kwargs:
            raise CollatorError(
                "pad_to_multiple_of: the padding is known by lengths. Set return_flash_attn_kwargs=True."
            )

        both = self.pad_to_multiple_of
        multiples = both if isinstance(both, (tuple, list)) and len(both) == 2 else (both, both)

        def of_row(longest: int | str | None, padding: int, multiple: Any) -> DataCollatorWithFlattening:
            return DataCollatorWithFlattening(
                return_tensors=self.return_tensors,
                separator_id=None,
                return_flash_attn_kwargs=self.return_flash_attn_kwargs,
                pad_to_multiple_of=multiple,
                pad_token_id=padding,
                max_documents=self.max_documents,
                longest_document=longest,
            )

        self._of = (
            of_row(self.longest_source, self.pad_token_id, multiples[0]),
            of_row(self.longest_target, self.label_pad_token_id, multiples[1]),
        )

    def __call__(self, features: Iterable[Mapping[str, Any]], return_tensors: str | None = None) -> dict[str, Any]:
        """Concatenate the examples.

        Args:
            features: Examples, each a mapping of lists, arrays or tensors.

                - ``input_ids``: the source's tokens, ``[length]``, without what ``attention_mask`` hides; or
                  ``input_features`` or ``pixel_values``, of one shape in all examples.
                - ``labels``: the target's tokens, ``[length]``.
                - ``decoder_input_ids``: the decoder's inputs, as many as labels; without them, the model makes them.

            return_tensors: Overrides the option for this call.

        Returns:
            ``input_ids`` and ``position_ids``, int64 ``[1, source tokens]``, or the sounds or pictures,
            ``[examples, ...]``; ``labels`` and ``decoder_position_ids``, int64 ``[1, target tokens]``;
            ``cu_seq_lens_q``, ``cu_seq_lens_k``, ``max_length_q`` and ``max_length_k`` of the sources, and the same
            names with ``decoder_`` before them of the targets.

        Raises:
            CollatorError: There are no examples, a source or a target has no tokens, an example has other columns, or
                a row does not fit the options.
        """
        framework = self._of[0].framework(return_tensors)
        examples = present(features)
        targets = [self._target(number, example) for number, example in enumerate(examples)]
        if self.model is not None and not any(_INPUTS in target for target in targets):
            self._add_inputs(targets)
        found = self._of[1](targets, framework)
        batch = {"labels" if name == "input_ids" else name: value for name, value in found.items() if name != "labels"}
        if "real_tokens" in batch:
            real = batch.pop("real_tokens")
            batch["labels"][real == 0] = IGNORED_LABEL
        batch = {name if name in (_TARGET, _INPUTS) else OF_TARGETS + name: batch[name] for name in batch}
        media = next((name for name in _MEDIA if name in examples[0]), None)
        if media is not None:
            batch[media] = _stacked(media, examples, framework)
            return batch
        sources = [self._source(number, example) for number, example in enumerate(examples)]
        of_sources = self._of[0](sources, framework)
        if self._of[0].empty:
            self._of[0].empty = 0
            raise CollatorError("an example has a source without tokens, and so nothing that its target belongs to.")
        return {**{name: of_sources[name] for name in of_sources if name not in ("labels", "real_tokens")}, **batch}

    def _target(self, number: int, example: Mapping[str, Any]) -> dict[str, Any]:
        known = {*_SOURCE, *_MEDIA, _TARGET, _INPUTS}
        others = [name for name in example if name not in known]
        if others or _TARGET not in example:
            wrong = f"{shown(others[0])} among its columns" if others else "no labels"
            raise CollatorError(
                f"example {number}: expected input_ids, labels and what belongs to them (attention_mask, "
                f"decoder_input_ids), found {wrong}."
            )
        labels = np.asarray(example[_TARGET])
        kept = np.flatnonzero(labels != self.label_pad_token_id)
        length = int(kept[-1]) + 1 if labels.ndim == 1 and len(kept) else 0
        if not length:
            raise CollatorError(f"example {number}: expected labels [length] with a token to learn, found none.")
        inputs = {_INPUTS: np.asarray(example[_INPUTS])[:length]} if _INPUTS in example else {}
        return {"input_ids": labels[:length], **inputs}

    def _add_inputs(self, targets: list[dict[str, Any]]) -> None:
        shift = getattr(self.model, "prepare_decoder_input_ids_from_labels", None)
        if shift is None:
            raise CollatorError(
                f"model: expected one with prepare_decoder_input_ids_from_labels, found {type(self.model).__name__}. "
                "Give the examples decoder_input_ids."
            )
        labels = [torch.from_numpy(target["input_ids"].astype(np.int64)) for target in targets]
        rows = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=IGNORED_LABEL)
        for target, inputs in zip(targets, shift(labels=rows).numpy()):
            target[_INPUTS] = inputs[: len(target["input_ids"])]

    def _source(self, number: int, example: Mapping[str, Any]) -> dict[str, Any]:
        if "input_ids" not in example:
            raise CollatorError(f"example {number}: expected input_ids, the source's tokens, found none.")
        return {name: example[name] for name in _SOURCE if name in example}


def _stacked(name: str, examples: Iterable[Mapping[str, Any]], framework: str) -> Any:
    arrays = [np.asarray(example.get(name)) for example in examples]
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1:
        raise CollatorError(f"{name}: expected one shape in all examples, found {', '.join(map(str, sorted(shapes)))}.")
    joined = np.stack(arrays)
    joined = joined.astype(np.float32) if joined.dtype == np.float64 else joined
    return torch.asarray(joined) if framework == "pt" else joined
