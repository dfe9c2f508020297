"""The tokens at whose places a model puts pictures, films and sound, and how many of them an example must have."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..documents.media import FILM, PICTURE, PLACEHOLDERS, SOUND, Key
from ..documents.names import GRIDS
from ..errors import CollatorError
from ..upstream import inspecting
from .flattening import Array, Columns
from .media import Media, entries
from .without_weights import WithoutWeights

_PACKS = "pack_image_features"
_HEARS = "_get_feat_extract_output_lengths"
_MERGES, _UNLESS_WRITTEN = "_merge_input_ids_with_", "legacy_processing"
"""A method that makes rows longer, and a forward's variable that says whether an example needs it."""

_PLACES = "image_position_ids"

_SIZES = (_PLACES, "image_sizes", "spatial_shapes", "image_grid_thw", "video_grid_thw", "image_attention_mask")
"""Keys of examples whose pictures may have different numbers of placeholders."""

_KINDS = {"pictures": (PICTURE, FILM), "sound": (SOUND,)}
"""Pictures and films are counted together, because some processors write a film's frames as pictures."""


class Placeholders:
    """The placeholders of a model. It keeps the model's config and classes, and no weights.

    Args:
        path: the models that a call goes through, the outermost first.

    Attributes:
        ids: token ids for each of ``"pictures"`` and ``"sound"``; empty lists if the model has none.
    """

    def __init__(self, path: Sequence[Any]) -> None:
        self._config = path[0].config
        configs = [self._config, *(getattr(self._config, f"{part}_config", None) for part in ("vision", "audio"))]
        names = {what: [name for kind in kinds for name in PLACEHOLDERS[kind]] for what, kinds in _KINDS.items()}
        found = {what: {getattr(each, name, None) for each in configs for name in names[what]} for what in names}
        self.ids = {what: sorted(token for token in tokens if isinstance(token, int)) for what, tokens in found.items()}
        self._packs = _with(path, _PACKS)
        self._hears = _with(path, _HEARS)
        towers = {type(module) for module in path[0].modules() if not any(module is model for model in path)}
        self._any_size = any(inspecting.takes(cls.forward, "image_sizes") for cls in towers)  # Pixtral's tower

    def refuse_new_rows(self, path: Sequence[Any]) -> None:
        """Raise :class:`CollatorError` if a forward merges pictures or sound by masks and positions of its own.

        Llava and PaliGemma up to 4.44 and Qwen2-Audio up to 4.47 do so. Later versions also do it, for examples whose
        placeholders were not written by the processor; the forward of a patched model finds that out.
        """
        for model in path:
            forward = inspecting.forward_of(type(model))
            merging = next((name for name in inspecting.names_read(forward) if name.startswith(_MERGES)), None)
            if merging is not None and not inspecting.has_variable(forward, _UNLESS_WRITTEN):
                raise CollatorError(
                    f"model: {type(model).__name__}.{merging} of this Transformers puts pictures or sound into a row "
                    "and makes its mask or position_ids anew, so that documents are lost. Upgrade Transformers (Llava, "
                    "Llava-NeXT and PaliGemma: 4.45, Qwen2-Audio: 4.48), or train this model padded."
                )

    def __bool__(self) -> bool:
        """Whether the model takes pictures or sound."""
        return any(self.ids.values())

    def at(self, ids: Array, what: str = "") -> Array:
        """Return a bool for each token id: whether it is a placeholder, of ``"pictures"`` or ``"sound"`` if given."""
        tokens = self.ids[what] if what else [token for tokens in self.ids.values() for token in tokens]
        return np.isin(ids, tokens)

    def check(self, examples: Sequence[Columns], media: Sequence[Media], keys: Sequence[Mapping[str, Key]]) -> None:
        """Raise :class:`CollatorError` if an example does not have the placeholders that its pictures and sound need.

        The number is known from grids and sizes. Without them every picture must have as many as those of the other
        examples.
        """
        for what, kinds in _KINDS.items():
            each: dict[int, tuple[int, int]] = {}
            for index, (columns, own, of) in enumerate(zip(examples, media, keys)):
                mine = {name: value for name, value in own.items() if of[name].of in kinds}
                found = int(self.at(columns["input_ids"], what).sum())
                expected = self._expected(index, what, mine) if mine else 0
                if expected is None:
                    each[index] = found, max(entries(mine[name], of[name]) for name in mine)
                if found == 0 and mine or expected not in (None, found):
                    raise CollatorError(
                        f"example {index}: expected {'some' if expected is None else expected} placeholders of {what} "
                        f"in input_ids, as {', '.join(mine) or 'no ' + what} says, found {found}. Was it truncated, or "
                        "is a picture or sound missing? Leave it out, or keep the document whole."
                    )
            if not any(name in own for own in media for name in _SIZES) or what == "sound":
                _require_one_number(what, each)

    def _expected(self, index: int, what: str, own: Media) -> int | None:
        """The number of placeholders that an example needs; None if nothing in it says so."""
        if what == "sound":
            return self._of_sound(own)
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

    def _of_sound(self, own: Media) -> int | None:
        if "audio_embed_sizes" in own:
            return int(own["audio_embed_sizes"].sum())
        if "feature_attention_mask" in own and self._hears is not None:
            count = getattr(self._hears.made(), _HEARS)
            lengths = count(own["feature_attention_mask"].long().sum(-1))
            return int(lengths[1].sum()) if isinstance(lengths, tuple) else None
        return None

    def _of_crops(self, index: int, sizes: torch.Tensor, together: torch.Tensor | None) -> int | None:
        """The number that the model's own ``pack_image_features`` gives for pictures that are cut into crops."""
        if self._packs is None:
            return None
        cropped = sys.modules[self._packs.cls.__module__].__dict__.get("image_size_to_num_patches")
        pack = getattr(self._packs.cls, _PACKS)
        if cropped is None or not {"image_features", "image_sizes"} <= set(inspecting.parameter_names(pack)):
            return None
        vision, points = self._config.vision_config, self._config.image_grid_pinpoints
        strategy = getattr(self._config, "vision_feature_select_strategy", "default")
        taken = inspecting.parameter_names(pack)
        of_class = strategy == "full" and "vision_feature_select_strategy" in taken
        tokens = (vision.image_size // vision.patch_size) ** 2 + of_class
        whole = together is not None and int(together.sum()) > 1
        try:
            crops = [1 if whole else cropped(size.tolist(), points, vision.image_size) for size in sizes]
            given = {"vision_feature_select_strategy": strategy, "image_newline": torch.zeros(1)}
            options = {name: value for name, value in given.items() if name in taken}
            features = [torch.zeros(count, tokens, 1) for count in crops]
            packed = pack(self._packs.made(), image_features=features, image_sizes=sizes, **options)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            raise CollatorError(
                f"example {index}: {self._packs.cls.__name__}.{_PACKS} does not count the placeholders of its pictures "
                f"({type(error).__name__}: {error}). Its image_sizes must be those that the processor returned."
            ) from error
        return int(sum(torch.as_tensor(packed[1]).tolist()))


def _require_one_number(what: str, found: Mapping[int, tuple[int, int]]) -> None:
    """Raise :class:`CollatorError` if a picture of one example has fewer placeholders than one of another.

    Args:
        what: the kind.
        found: by example, the number of its placeholders and of its pictures.
    """
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


def _with(path: Sequence[Any], name: str) -> WithoutWeights | None:
    """The innermost model that has a method of its own; those around it call that one."""
    found = [module for module in path[0].modules() if hasattr(type(module), name)]
    return WithoutWeights(found[-1]) if found else None
