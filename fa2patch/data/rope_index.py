"""Position ids of documents with pictures, as a model's own ``get_rope_index`` counts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..documents.names import GRIDS
from ..errors import CollatorError
from ..upstream import inspecting
from ..upstream.find_models import models, outermost_models
from ..upstream.traits.axes import takes_text_axis
from .flattening import Columns
from .without_weights import WithoutWeights

HEARD, FROM_FILM = "feature_attention_mask", "use_audio_in_video"
"""Arguments of Qwen2.5-Omni: which frames of a sound are not filled in, and whether sound belongs to its film."""

SPELLED = {"video_second_per_grid": "second_per_grids"}
"""Keys that ``get_rope_index`` takes under another name."""

TYPES = "mm_token_type_ids"
"""The kind of every token: text, picture or film."""

_MAPPINGS = (
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_VISION_2_SEQ_MAPPING",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_MAPPING",
)


class RopeIndex:
    """The ``get_rope_index`` of a model's class, if it has one. It keeps the model's config and no weights.

    Args:
        path: The models that a call goes through, the outermost first.

    Attributes:
        several_axes: Whether the model has a ``get_rope_index``.
        config: The config that it reads.
        text_axis: Whether the model takes a fourth axis of position ids, for text.
        takes_types: Whether the model takes :data:`TYPES`.
    """

    def __init__(self, path: Sequence[Any]) -> None:
        counting = next((inner for inner in path if hasattr(inner, "get_rope_index")), None)
        self.several_axes = counting is not None
        counting = path[0] if counting is None else counting
        self._counting, self.config = WithoutWeights(counting), counting.config
        self.text_axis = takes_text_axis(path[-1])
        self.takes_types = any(inspecting.takes(inner.forward, TYPES) for inner in path)

    def positions(self, index: int, columns: Columns, own: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the time, height and width ids of one document, int64 ``[3, 1, n]``.

        Args:
            index: The example's index in the batch, for errors.
            columns: The example's columns.
            own: Its pictures, films and sound.

        Raises:
            CollatorError: ``get_rope_index`` fails, or takes token types that are missing.
        """
        ids = torch.from_numpy(columns["input_ids"])[None]
        if not any(name in own for name in (*GRIDS, HEARD)):
            return torch.arange(ids.shape[1]).expand(3, 1, -1)
        count = self._counting.made().get_rope_index
        takes = inspecting.parameter_names(count)
        given: dict[str, Any] = {SPELLED.get(name, name): value for name, value in own.items()}
        if HEARD in own:
            given["audio_seqlens"] = own[HEARD].long().sum(-1)
        if FROM_FILM in given:
            given[FROM_FILM] = bool(given[FROM_FILM])
        call = {name: value for name, value in given.items() if name in takes and name not in columns}
        if TYPES in takes:
            if TYPES not in columns:
                raise CollatorError(
                    f"example {index}: {TYPES} missing, by which {self._counting.cls.__name__} counts the "
                    f"positions of pictures; found {', '.join(columns)}. Keep it: the processor returns it."
                )
            call[TYPES] = torch.from_numpy(columns[TYPES])[None].int()
        try:
            positions: torch.Tensor = count(input_ids=ids, attention_mask=torch.ones_like(ids), **call)[0]
        except (IndexError, RuntimeError, StopIteration, TypeError, ValueError) as error:
            raise CollatorError(
                f"example {index}: {self._counting.cls.__name__}.get_rope_index does not count its positions "
                f"({type(error).__name__}: {error}). Its grids must be those of its placeholders, in their order."
            ) from error
        if tuple(positions.shape[1:]) != (1, ids.shape[1]):
            raise CollatorError(
                f"example {index}: get_rope_index gave positions {list(positions.shape)} for {ids.shape[1]} tokens."
            )
        return positions[-3:].long()


def path_of(model: Any) -> list[Any]:
    """The models that a call of a model goes through, the outermost first.

    Args:
        model: A model, wrapped or not, or its config, from which a model without weights is built.

    Raises:
        CollatorError: It is neither, or holds several models.
    """
    return models(_unwrapped(model) if isinstance(model, torch.nn.Module) else _empty(model))


def _unwrapped(model: torch.nn.Module) -> Any:
    found = outermost_models(model)
    if len(found) != 1:
        names = "".join(f", {name} ({type(inner).__name__})" for name, inner in found.items())
        raise CollatorError(
            f"model: expected a Transformers model or its config, found {len(found)} of them in this "
            f"{type(model).__name__}{names}. Hand over the one that reads these batches."
        )
    return next(iter(found.values()))


def _empty(config: object) -> Any:
    """Build a model of this config on the meta device."""
    from transformers.models.auto import modeling_auto

    for name in _MAPPINGS:
        mapping: Any = getattr(modeling_auto, name, {})
        cls = mapping.get(type(config), None)
        if isinstance(cls, type):
            with torch.device("meta"):
                model = cls(config)
            return model
    raise CollatorError(
        f"model: expected a Transformers model, or the config of one with pictures or sound, found "
        f"{type(config).__name__}. If it is such a config, hand over the model."
    )
