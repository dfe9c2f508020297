"""Position ids of documents with pictures, as a model's own ``get_rope_index`` counts them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..documents.names import GRIDS
from ..errors import CollatorError
from ..upstream import inspecting
from ..upstream.find_models import is_transformers_model, models
from ..upstream.traits.axes import takes_text_axis
from .flattening import Columns

SECONDS = "second_per_grid_ts"
"""Seconds between the grids of each film, which ``get_rope_index`` takes and a model does not."""

TYPES = "mm_token_type_ids"
"""The kind of every token: text, picture or film."""

_MAPPINGS = (
    "MODEL_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_VISION_2_SEQ_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
)


class RopeIndex:
    """The ``get_rope_index`` of a model's class. It keeps the model's config and no weights.

    Args:
        model: A model, wrapped or not, or its config, from which a model without weights is built.

    Attributes:
        config: The config that ``get_rope_index`` reads.
        text_axis: Whether the model takes a fourth axis of position ids, for text.
        takes_types: Whether the model takes :data:`TYPES`.

    Raises:
        CollatorError: The model has no ``get_rope_index``.
    """

    def __init__(self, model: Any) -> None:
        model = _unwrapped(model) if isinstance(model, torch.nn.Module) else _empty(model)
        path = models(model)
        counting = next((inner for inner in path if hasattr(inner, "get_rope_index")), None)
        if counting is None:
            raise CollatorError(
                f"model: expected one with a get_rope_index (Qwen2-VL, Qwen3-VL, GLM-4V, ...), found {type(model)}. "
                "Its position ids count up by one: fa2patch.DataCollatorWithFlattening is for it."
            )
        self._class, self.config = type(counting), counting.config
        self.text_axis = takes_text_axis(path[-1])
        self.takes_types = any(inspecting.takes(inner.forward, TYPES) for inner in path)

    def positions(self, index: int, columns: Columns, pictures: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the time, height and width ids of one document, int64 ``[3, 1, n]``.

        Args:
            index: The example's index in the batch, for errors.
            columns: The example's columns.
            pictures: Its pictures, grids and :data:`SECONDS`.

        Raises:
            CollatorError: ``get_rope_index`` fails, or takes token types that are missing.
        """
        ids = torch.from_numpy(columns["input_ids"])[None]
        if not any(name in pictures for name in GRIDS):
            return torch.arange(ids.shape[1]).expand(3, 1, -1)
        count = self._class.get_rope_index
        takes = inspecting.parameter_names(count)
        call = {name: pictures[name] for name in (*GRIDS, SECONDS) if name in pictures and name in takes}
        if TYPES in takes:
            if TYPES not in columns:
                raise CollatorError(
                    f"example {index}: {TYPES} missing, by which this version's {self._class.__name__} counts the "
                    f"positions of pictures; found {', '.join(columns)}. Keep it: the processor returns it."
                )
            call[TYPES] = torch.from_numpy(columns[TYPES])[None].int()
        counting: Any = object.__new__(self._class)
        torch.nn.Module.__init__(counting)
        counting.__dict__["config"] = self.config
        try:
            positions: torch.Tensor = count(counting, input_ids=ids, attention_mask=torch.ones_like(ids), **call)[0]
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


def _unwrapped(model: torch.nn.Module) -> Any:
    found = next((module for module in model.modules() if is_transformers_model(module)), None)
    if found is None:
        raise CollatorError(f"model: expected a Transformers model or its config, found {type(model).__name__}.")
    return found


def _empty(config: object) -> Any:
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
