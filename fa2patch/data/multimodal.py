"""Collator that packs examples with pictures, as processors of the Qwen-VL family and similar models return them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..documents.names import GRIDS, IGNORED_LABEL, PICTURES
from ..errors import CollatorError
from .collators import DataCollatorWithFlattening
from .flattening import Array, Columns, given, read, require_same_keys
from .rope_index import SECONDS, TYPES, RopeIndex

_MADE_HERE = ("position_ids", "seq_lengths", "rope_deltas")


class DataCollatorForMultimodalFlattening:
    """Concatenate the examples of a mini-batch, with their pictures and films, into one row without padding.

    The collator is for models with position ids on several axes (mRoPE) and their own ``get_rope_index``: Qwen2-VL,
    Qwen2.5-VL, Qwen3-VL, Qwen3.5, GLM-4V and similar models. ``get_rope_index`` is called separately for each document
    that has pictures.

    Args:
        model: The model to be trained, wrapped or not, or its config, from which a model without weights is built.
            The collator keeps the config and no weights, so it can be sent to the workers of a DataLoader.
        pad_to_multiple_of: Pad the row to a multiple of this many tokens. The padding is a document of its own: its
            labels are -100, and its position ids count up from 0.
        pad_token_id: ``input_ids`` of the padding.
        return_seq_idx: Return ``seq_idx``, the document number of every token.
        loss_masks: See :class:`DataCollatorWithFlattening`.

    Raises:
        CollatorError: The model has no ``get_rope_index``, or an option is invalid.
    """

    def __init__(
        self,
        model: Any,
        *,
        pad_to_multiple_of: int | None = None,
        pad_token_id: int = 0,
        return_seq_idx: bool = False,
        loss_masks: Sequence[str] = (),
    ) -> None:
        self._rope = RopeIndex(model)
        self._flatten = DataCollatorWithFlattening(
            return_flash_attn_kwargs=True,
            return_seq_idx=return_seq_idx,
            pad_to_multiple_of=pad_to_multiple_of,
            pad_token_id=pad_token_id,
            loss_masks=loss_masks,
        )

    def __call__(self, features: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Concatenate the examples into one packed row of T tokens.

        Args:
            features: Examples as the processor returns them, one document each, as lists, arrays or tensors.

                - ``input_ids`` and all other columns with one number per token (``attention_mask``, ``labels``,
                  ``mm_token_type_ids``, ...): ``[n]`` or ``[1, n]``. Tokens whose mask is 0 are dropped.
                - ``labels``: Default to ``input_ids``, with -100 at the placeholders of pictures.
                - ``pixel_values`` ``[patches, ...]`` with ``image_grid_thw`` ``[images, 3]``, and
                  ``pixel_values_videos`` with ``video_grid_thw``: In some, all or none of the examples.
                - ``second_per_grid_ts`` ``[films]``: Passed to ``get_rope_index`` and not returned.

        Returns:
            ``input_ids`` and ``labels``: int64 ``[1, T]``; the first label of every document is -100.
            ``position_ids``: int64 ``[4, 1, T]`` (text, time, height, width) if the installed version's model takes
            four axes, else ``[3, 1, T]``. The text axis counts up in each document. ``cu_seq_lens_q`` and
            ``cu_seq_lens_k``: int32 ``[documents + 1]``. ``max_length_q`` and ``max_length_k``: int. Pictures and
            grids: concatenated in the order of the examples. ``mm_token_type_ids``, if the model takes them, and all
            other columns: ``[1, T]``.

        Raises:
            CollatorError: In the cases of :class:`DataCollatorWithFlattening`; and if an example has
                ``position_ids``, ``seq_lengths`` or ``rope_deltas``, patches and grids do not match, the number of
                placeholders in ``input_ids`` is not that of the grids (for example after truncation), or
                ``mm_token_type_ids`` are missing and ``get_rope_index`` takes them.
        """
        if not isinstance(features, Iterable) or isinstance(features, Mapping):
            raise CollatorError(f"expected a list of examples, found {type(features).__name__}.")
        examples, pictures, axes = [], [], []
        for index, feature in enumerate(features):
            columns, own = self._split(index, feature)
            self._check(index, columns["input_ids"], own)
            axes.append(self._rope.positions(index, columns, own))
            examples.append(columns)
            pictures.append(own)
        self._complete(examples)
        batch = self._flatten(examples)
        text, found = batch["position_ids"][None], torch.cat(axes, dim=-1)
        padding = text[..., found.shape[-1] :].expand(3, -1, -1)
        three = torch.cat([found, padding], dim=-1)
        batch["position_ids"] = torch.cat([text, three]) if self._rope.text_axis else three
        for name in PICTURES:
            parts = [own[name] for own in pictures if name in own]
            if parts:
                batch[name] = _concatenated(name, parts)
        return batch

    def _split(self, index: int, feature: Mapping[str, Any]) -> tuple[Columns, dict[str, torch.Tensor]]:
        """Split an example into its columns, without masked tokens, and its pictures."""
        found = given(index, feature)
        for name in _MADE_HERE:
            if name in found:
                raise CollatorError(f"example {index}: {name} is made by the collator. Remove it from the examples.")
        own = {name: _tensor(index, name, found.pop(name)) for name in (*PICTURES, SECONDS) if name in found}
        return read(index, {name: _of_one_row(value) for name, value in found.items()}), own

    def _check(self, index: int, ids: Array, own: Mapping[str, torch.Tensor]) -> None:
        """Check that pictures, grids and placeholders of one document belong together."""
        patches_in_all = 0
        for grid, patches in GRIDS.items():
            if (grid in own) != (patches in own):
                there, missing = (grid, patches) if grid in own else (patches, grid)
                raise CollatorError(
                    f"example {index}: {there} without {missing}. Keep both, as the processor gives them."
                )
            if grid not in own:
                continue
            if own[grid].dim() != 2 or own[grid].shape[1] != 3 or own[grid].is_floating_point():
                raise CollatorError(
                    f"example {index}: {grid} must be integers [pictures, 3], found {own[grid].dtype} "
                    f"{list(own[grid].shape)}."
                )
            expected = int(own[grid].prod(dim=1).sum())
            if len(own[patches]) != expected:
                raise CollatorError(
                    f"example {index}: {grid} says {expected} patches, {patches} holds {len(own[patches])}. Pass what "
                    "the processor returned for this example, a row for each patch."
                )
            patches_in_all += expected
        merged = getattr(self._rope.config.vision_config, "spatial_merge_size", 1) ** 2
        found = int(self._is_placeholder(ids).sum())
        if found != patches_in_all // merged:
            raise CollatorError(
                f"example {index}: expected {patches_in_all // merged} placeholders of pictures in input_ids, as its "
                f"grids say, found {found}. Was it truncated, or is a picture missing? Leave it out, or keep the "
                "document whole."
            )

    def _complete(self, examples: Sequence[Columns]) -> None:
        """Add labels, and token types where only some examples have them; remove types that no forward takes."""
        if not self._rope.takes_types:
            for columns in examples:
                columns.pop(TYPES, None)
        elif any(TYPES in columns for columns in examples):
            for columns in examples:  # All tokens of a document without pictures are text.
                columns.setdefault(TYPES, np.zeros_like(columns["input_ids"]))
        require_same_keys([{name: 0 for name in columns if name != "labels"} for columns in examples])
        for columns in examples:
            ids = columns["input_ids"]
            columns.setdefault("labels", np.where(self._is_placeholder(ids), IGNORED_LABEL, ids))

    def _is_placeholder(self, ids: Array) -> Array:
        tokens = [getattr(self._rope.config, name, None) for name in ("image_token_id", "video_token_id")]
        return np.isin(ids, [token for token in tokens if token is not None])


def _of_one_row(value: Any) -> Any:
    """Turn ``[1, n]``, as a processor returns it, into ``[n]``."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value[0] if value.ndim == 2 and len(value) == 1 else value
    if isinstance(value, (list, tuple)) and len(value) == 1 and isinstance(value[0], (list, tuple, np.ndarray)):
        return value[0]
    return value


def _tensor(index: int, name: str, value: Any) -> torch.Tensor:
    try:
        return value if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError) as error:
        raise CollatorError(f"example {index}: {name} is no array of numbers ({error}).") from error


def _concatenated(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) > 1:
        raise CollatorError(f"{name}: examples hold rows of shapes {sorted(shapes)}. Use one processor for all.")
    return torch.cat(parts)
