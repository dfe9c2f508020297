"""Collator that packs examples with pictures, as processors of the Qwen-VL family and similar models return them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..documents.names import GRIDS, IGNORED_LABEL
from ..errors import CollatorError
from ..upstream.find_models import is_transformers_model, models
from ..upstream.traits.axes import takes_text_axis
from .collators import DataCollatorWithFlattening
from .flattening import Columns, given, read, require_same_keys

_OF_A_FILM = ("second_per_grid_ts",)
_TYPES = "mm_token_type_ids"
_MADE_HERE = ("position_ids", "seq_lengths", "rope_deltas")
_MAPPINGS = (
    "MODEL_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_VISION_2_SEQ_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
)


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
        model = _unwrapped(model) if isinstance(model, torch.nn.Module) else _empty(model)
        path = models(model)
        counting = next((inner for inner in path if hasattr(inner, "get_rope_index")), None)
        if counting is None:
            raise CollatorError(
                f"model: expected one with a get_rope_index (Qwen2-VL, Qwen3-VL, GLM-4V, ...), found {type(model)}. "
                "Its position ids count up by one: fa2patch.DataCollatorWithFlattening is for it."
            )
        self.text_axis = takes_text_axis(path[-1])
        self._class, self._config = type(counting), counting.config
        parameters = {name for inner in path for name in inspect.signature(inner.forward).parameters}
        self._takes_types = _TYPES in parameters
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
        examples, axes = [], []
        pictures: dict[str, list[torch.Tensor]] = {name: [] for pair in GRIDS.items() for name in reversed(pair)}
        for index, feature in enumerate(features):
            columns, own = self._split(index, feature)
            axes.append(self._positions(index, columns, own))
            for name, value in own.items():
                if name in pictures:
                    pictures[name].append(value)
            if not self._takes_types:
                columns.pop(_TYPES, None)
            examples.append(columns)
        if self._takes_types and any(_TYPES in columns for columns in examples):
            for columns in examples:  # All tokens of a document without pictures are text.
                columns.setdefault(_TYPES, np.zeros_like(columns["input_ids"]))
        require_same_keys([{name: 0 for name in columns if name != "labels"} for columns in examples])
        for columns in examples:
            columns.setdefault("labels", self._learned(columns["input_ids"]))
        batch = self._flatten(examples)
        text = batch["position_ids"][None]
        found = torch.cat(axes, dim=-1)
        padding = text[..., found.shape[-1] :].expand(3, -1, -1)
        three = torch.cat([found, padding], dim=-1)
        batch["position_ids"] = torch.cat([text, three]) if self.text_axis else three
        batch.update({name: _concatenated(name, parts) for name, parts in pictures.items() if parts})
        return batch

    def _split(self, index: int, feature: Any) -> tuple[Columns, dict[str, torch.Tensor]]:
        """Split an example into its columns, without masked tokens, and its pictures."""
        found = given(index, feature)
        for name in _MADE_HERE:
            if name in found:
                raise CollatorError(f"example {index}: {name} is made by the collator. Remove it from the examples.")
        own = {
            name: _tensor(index, name, found.pop(name))
            for name in (*GRIDS, *GRIDS.values(), *_OF_A_FILM)
            if name in found
        }
        return read(index, {name: _of_one_row(value) for name, value in found.items()}), own

    def _positions(self, index: int, columns: Columns, own: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the time, height and width ids of one document, int64 ``[3, 1, n]``."""
        ids = torch.from_numpy(columns["input_ids"])[None]
        self._check(index, ids, own)
        counts = self._class.get_rope_index
        takes = inspect.signature(counts).parameters
        call = {name: own[name] for name in (*GRIDS, *_OF_A_FILM) if name in own and name in takes}
        if not any(name in own for name in GRIDS):
            return torch.arange(ids.shape[1]).expand(3, 1, -1)
        if _TYPES in takes:
            if _TYPES not in columns:
                raise CollatorError(
                    f"example {index}: {_TYPES} missing, by which this version's {self._class.__name__} counts the "
                    f"positions of pictures; found {', '.join(columns)}. Keep it: the processor returns it."
                )
            call[_TYPES] = torch.from_numpy(columns[_TYPES])[None].int()
        counting: Any = object.__new__(self._class)
        torch.nn.Module.__init__(counting)
        counting.__dict__["config"] = self._config
        try:
            positions: torch.Tensor = counts(counting, input_ids=ids, attention_mask=torch.ones_like(ids), **call)[0]
        except (IndexError, RuntimeError, StopIteration, TypeError, ValueError) as error:
            raise CollatorError(
                f"example {index}: {self._class.__name__}.get_rope_index does not count its positions "
                f"({type(error).__name__}: {error}). Its grids must be those of its placeholders, in their order."
            ) from error
        if tuple(positions.shape[1:]) != (1, ids.shape[1]):
            raise CollatorError(
                f"example {index}: get_rope_index gave positions {list(positions.shape)} for {ids.shape[1]} tokens."
            )
        return positions[-3:].long()

    def _check(self, index: int, ids: torch.Tensor, own: dict[str, torch.Tensor]) -> None:
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
        merged = getattr(self._config.vision_config, "spatial_merge_size", 1) ** 2
        expected = sum(int(own[grid].prod(dim=1).sum()) for grid in GRIDS if grid in own) // merged
        found = int(self._is_placeholder(ids.numpy()).sum())
        if found != expected:
            raise CollatorError(
                f"example {index}: expected {expected} placeholders of pictures in input_ids, as its grids say, found "
                f"{found}. Was it truncated, or is a picture missing? Leave it out, or keep the document whole."
            )

    def _is_placeholder(self, ids: Any) -> Any:
        tokens = [getattr(self._config, name, None) for name in ("image_token_id", "video_token_id")]
        return np.isin(ids, [token for token in tokens if token is not None])

    def _learned(self, ids: Any) -> Any:
        return np.where(self._is_placeholder(ids), IGNORED_LABEL, ids)


def _unwrapped(model: Any) -> Any:
    found = next((module for module in model.modules() if is_transformers_model(module)), None)
    if found is None:
        raise CollatorError(f"model: expected a Transformers model or its config, found {type(model).__name__}.")
    return found


def _empty(config: Any) -> Any:
    """Build a model of this config on the meta device."""
    from transformers.models.auto import modeling_auto

    for name in _MAPPINGS:
        mapping: Any = getattr(modeling_auto, name, {})
        cls = mapping.get(type(config), None)
        if isinstance(cls, type):
            with torch.device("meta"):
                model = cls(config)
            if any(hasattr(inner, "get_rope_index") for inner in models(model)):
                return model
    raise CollatorError(
        f"model: expected a Transformers model that has a get_rope_index, or its config, found {type(config).__name__}."
    )


def _of_one_row(value: Any) -> Any:
    """Turn ``[1, n]``, as a processor returns it, into ``[n]``."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value[0] if value.ndim == 2 and len(value) == 1 else value
    if isinstance(value, (list, tuple)) and len(value) == 1 and isinstance(value[0], (list, tuple, np.ndarray)):
        return value[0]
    return value


def _tensor(index: int, name: str, value: Any) -> torch.Tensor:
    try:
        tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError) as error:
        raise CollatorError(f"example {index}: {name} is no array of numbers ({error}).") from error
    return tensor


def _concatenated(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) > 1:
        raise CollatorError(f"{name}: examples hold rows of shapes {sorted(shapes)}. Use one processor for all.")
    return torch.cat(parts)
