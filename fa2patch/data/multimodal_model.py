"""What a model says of its pictures and sound: their placeholders among the tokens, and their position ids."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..documents.names import FILM, GRIDS, PICTURE, PLACEHOLDERS, SOUND
from ..errors import CollatorError
from ..upstream import axes, inspecting
from ..upstream.find_models import models, outermost_models
from .columns import Array
from .processor_outputs import Example, Media, entries

TYPES = "mm_token_type_ids"  # the kind of every token: text, picture or film

_PLACES = "image_position_ids"

# With these keys, pictures of examples may have different numbers of placeholders.
_SIZES = (_PLACES, "image_sizes", "spatial_shapes", "image_grid_thw", "video_grid_thw", "image_attention_mask")

# Pictures and films are counted together, because some processors write a film's frames as pictures.
_KINDS = {"pictures": (PICTURE, FILM), "sound": (SOUND,)}

_MAPPINGS = (
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_VISION_2_SEQ_MAPPING",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_MAPPING",
)


def path_of(model: Any) -> list[Any]:
    # `model` may also be a config, from which a model without weights is built.
    if not isinstance(model, torch.nn.Module):
        return models(_built(model))
    found = outermost_models(model)
    if len(found) != 1:
        names = "".join(f", {name} ({type(inner).__name__})" for name, inner in found.items())
        raise CollatorError(
            f"model: expected a Transformers model or its config, found {len(found)} of them in this "
            f"{type(model).__name__}{names}. Hand over the one that reads these batches."
        )
    return models(next(iter(found.values())))


def _built(config: object) -> Any:
    from transformers.models.auto import modeling_auto

    for name in _MAPPINGS:
        cls = getattr(modeling_auto, name, {}).get(type(config), None)
        if isinstance(cls, type):
            with torch.device("meta"):
                return cls(config)
    raise CollatorError(
        f"model: expected a Transformers model, or the config of one with pictures or sound, found "
        f"{type(config).__name__}. If it is such a config, hand over the model."
    )


def _without_weights(module: Any) -> Any:
    # Methods of the module that read no weights can be called on this object, which is small when pickled.
    plain = {name: value for name, value in vars(module).items() if isinstance(value, (int, float, str))}
    made: Any = object.__new__(type(module))
    torch.nn.Module.__init__(made)
    made.__dict__.update(plain, config=module.config)
    return made


class Placeholders:
    """The placeholders of a model. It keeps the model's config and classes, and no weights."""

    def __init__(self, path: Sequence[Any]) -> None:
        self._config = path[0].config
        configs = [self._config, *(getattr(self._config, f"{part}_config", None) for part in ("vision", "audio"))]
        self._ids: dict[str, list[int]] = {}  # for each of "pictures" and "sound"; empty if the model has none
        for what, kinds in _KINDS.items():
            tokens = {getattr(each, name, None) for each in configs for kind in kinds for name in PLACEHOLDERS[kind]}
            self._ids[what] = sorted(token for token in tokens if isinstance(token, int))
        if not any(self._ids.values()):
            raise CollatorError(
                f"model: expected one with pictures or sound, whose config has their placeholder (image_token_id, "
                f"audio_token_id, ...), found {type(path[0]).__name__}. fa2patch.DataCollatorWithFlattening is for it."
            )
        for model in path:
            _refuse_new_rows(type(model))
        self._packs = _innermost_with(path, "pack_image_features")
        self._hears = _innermost_with(path, "_get_feat_extract_output_lengths")
        towers = {type(module) for module in path[0].modules() if not any(module is model for model in path)}
        self._any_size = any(inspecting.takes(cls.forward, "image_sizes") for cls in towers)  # Pixtral's tower

    def at(self, ids: Array, what: str = "") -> Array:  # what: "pictures" or "sound"; else both
        tokens = self._ids[what] if what else [token for tokens in self._ids.values() for token in tokens]
        return np.isin(ids, tokens)

    def check(self, examples: Sequence[Example]) -> None:
        # The number is known from grids and sizes. Without them, every picture must have as many as those of the other
        # examples.
        for what, kinds in _KINDS.items():
            each: dict[int, tuple[int, int]] = {}
            for index, (columns, media, keys) in enumerate(examples):
                mine = {name: value for name, value in media.items() if keys[name].of in kinds}
                found = int(self.at(columns["input_ids"], what).sum())
                expected = self._expected(index, what, mine) if mine else 0
                if expected is None:
                    each[index] = found, max(entries(mine[name], keys[name]) for name in mine)
                if found == 0 and mine or expected not in (None, found):
                    raise CollatorError(
                        f"example {index}: expected {'some' if expected is None else expected} placeholders of {what} "
                        f"in input_ids, as {', '.join(mine) or 'no ' + what} says, found {found}. Was it truncated, or "
                        "is a picture or sound missing? Leave it out, or keep the document whole."
                    )
            if what == "sound" or not any(name in example.media for example in examples for name in _SIZES):
                _require_one_number(what, each)

    def _expected(self, index: int, what: str, own: Media) -> int | None:
        if what == "sound":
            if "audio_embed_sizes" in own:
                return int(own["audio_embed_sizes"].sum())
            if axes.HEARD not in own or self._hears is None:
                return None
            lengths = self._hears._get_feat_extract_output_lengths(own[axes.HEARD].long().sum(-1))
            return int(lengths[1].sum()) if isinstance(lengths, tuple) else None
        if any(grid in own for grid in GRIDS):
            merged = getattr(self._config.vision_config, "spatial_merge_size", 1) ** 2
            return sum(int(own[grid].prod(dim=1).sum()) for grid in GRIDS if grid in own) // merged
        if _PLACES in own:
            real = (own[_PLACES] >= 0).all(dim=-1)
            return int(real.sum()) // int(self._config.vision_config.pooling_kernel_size) ** 2
        if "image_sizes" not in own or "pixel_values" not in own:
            return None
        sizes = own["image_sizes"].reshape(-1, 2)
        if not hasattr(self._config, "image_grid_pinpoints"):
            merged = getattr(self._config, "spatial_merge_size", 1) * self._config.vision_config.patch_size
            return int((sizes // merged).prod(dim=-1).sum()) if self._any_size else None
        return self._of_crops(index, sizes, own.get("batch_num_images"))

    def _of_crops(self, index: int, sizes: torch.Tensor, together: torch.Tensor | None) -> int | None:
        # For pictures that are cut into crops, the model's own pack_image_features gives the number.
        if self._packs is None:
            return None
        cropped = sys.modules[type(self._packs).__module__].__dict__.get("image_size_to_num_patches")
        pack = self._packs.pack_image_features
        taken = inspecting.parameter_names(pack)
        if cropped is None or not {"image_features", "image_sizes"} <= set(taken):
            return None
        vision, points = self._config.vision_config, self._config.image_grid_pinpoints
        strategy = getattr(self._config, "vision_feature_select_strategy", "default")
        of_class = strategy == "full" and "vision_feature_select_strategy" in taken
        tokens = (vision.image_size // vision.patch_size) ** 2 + of_class
        whole = together is not None and int(together.sum()) > 1
        try:
            crops = [1 if whole else cropped(size.tolist(), points, vision.image_size) for size in sizes]
            given = {"vision_feature_select_strategy": strategy, "image_newline": torch.zeros(1)}
            options = {name: value for name, value in given.items() if name in taken}
            features = [torch.zeros(count, tokens, 1) for count in crops]
            packed = pack(image_features=features, image_sizes=sizes, **options)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            raise CollatorError(
                f"example {index}: {type(self._packs).__name__}.pack_image_features does not count the placeholders of "
                f"its pictures ({type(error).__name__}: {error}). Its image_sizes must be those that the processor "
                "returned."
            ) from error
        return int(sum(torch.as_tensor(packed[1]).tolist()))


def _require_one_number(what: str, found: Mapping[int, tuple[int, int]]) -> None:
    # `found` has, by example, the number of its placeholders and of its pictures. A picture with fewer placeholders
    # than one of another example was cut off.
    if not found:
        return
    most = max(found, key=lambda index: found[index][0] / found[index][1])
    for index, (placeholders, count) in found.items():
        if placeholders * found[most][1] != found[most][0] * count:
            raise CollatorError(
                f"example {index}: {placeholders} placeholders of {what} in input_ids for {count} of them, example "
                f"{most} has {found[most][0]} for {found[most][1]}. Was it truncated? Leave it out, or keep the "
                "document whole."
            )


def _innermost_with(path: Sequence[Any], method: str) -> Any:
    # Modules around the innermost one call its method.
    found = [module for module in path[0].modules() if hasattr(type(module), method)]
    return _without_weights(found[-1]) if found else None


def _refuse_new_rows(cls: type[Any]) -> None:
    # Llava and PaliGemma up to 4.44 and Qwen2-Audio up to 4.47 merge pictures or sound by masks and positions of their
    # own. Later versions also do it, for examples whose placeholders were not written by the processor; the forward of
    # a patched model finds that out.
    forward = inspecting.forward_of(cls)
    merging = next((name for name in inspecting.names_read(forward) if name.startswith("_merge_input_ids_with_")), None)
    # a forward with this variable asks whether the processor has written the placeholders, and merges if it has not
    if merging is not None and not inspecting.has_variable(forward, "legacy_processing"):
        raise CollatorError(
            f"model: {cls.__name__}.{merging} of this Transformers puts pictures or sound into a row "
            "and makes its mask or position_ids anew, so that documents are lost. Upgrade Transformers (Llava, "
            "Llava-NeXT and PaliGemma: 4.45, Qwen2-Audio: 4.48), or train this model padded."
        )


class RopeIndex:
    """The ``get_rope_index`` of a model's class, if it has one. It keeps the model's config and no weights."""

    def __init__(self, path: Sequence[Any]) -> None:
        counting = next((inner for inner in path if hasattr(inner, "get_rope_index")), None)
        self.several_axes = counting is not None
        self._counting = _without_weights(path[0] if counting is None else counting)
        self.text_axis = axes.takes_text_axis(path[-1])  # a fourth axis of position ids
        self.takes_types = any(inspecting.takes(inner.forward, TYPES) for inner in path)

    def positions(self, index: int, example: Example) -> torch.Tensor:
        # The ids of one document are int64 [3, 1, n]: time, height and width.
        columns, media, _ = example
        ids = torch.from_numpy(columns["input_ids"])[None]
        if not any(name in media for name in (*GRIDS, axes.HEARD)):
            return torch.arange(ids.shape[1]).expand(3, 1, -1)
        if TYPES in inspecting.parameter_names(self._counting.get_rope_index) and TYPES not in columns:
            raise CollatorError(
                f"example {index}: {TYPES} missing, by which {type(self._counting).__name__} counts the "
                f"positions of pictures; found {', '.join(columns)}. Keep it: the processor returns it."
            )
        given = {name: value for name, value in media.items() if name not in columns}
        if TYPES in columns:
            given[TYPES] = torch.from_numpy(columns[TYPES])[None].int()
        try:
            positions = axes.rope_index(self._counting, ids, torch.ones_like(ids), given)
        except axes.FAILURES as error:
            raise CollatorError(
                f"example {index}: {type(self._counting).__name__}.get_rope_index does not count its positions "
                f"({type(error).__name__}: {error}). Its grids must be those of its placeholders, in their order."
            ) from error
        if tuple(positions.shape[1:]) != (1, ids.shape[1]):
            raise CollatorError(
                f"example {index}: get_rope_index gave positions {list(positions.shape)} for {ids.shape[1]} tokens."
            )
        return positions.long()
