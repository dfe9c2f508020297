"""Tiny models with pictures or sound, and documents for them like those of their processors.

Processors are not run: documents have the shapes that the processors' documentation gives (``media_families``).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from typing import Any

import torch

from . import tiny_configs, tiny_models, tiny_overrides
from .media_families import FAMILIES, NO_CONFIG, PICTURE, START, TOKENS
from .tiny_pictures import Document


def model_class(family: str) -> Any:
    # It is an AttributeError if the installed Transformers does not have the class.
    transformers = importlib.import_module("transformers")
    cls = getattr(transformers, FAMILIES[family].cls)
    vision = FAMILIES[family].vision
    if vision and vision not in transformers.CONFIG_MAPPING:
        raise AttributeError(f"this Transformers has no {vision}")
    return cls


def config_of(family: str, **changes: Any) -> Any:
    # changes: settings of the text model's part
    if family in NO_CONFIG:
        return tiny_models.config_of(family.partition(":")[0], **changes)
    told, cls = FAMILIES[family], model_class(family).config_class
    known, kinds = tiny_models.parameters(cls), importlib.import_module("transformers").CONFIG_MAPPING
    architecture = family.partition(":")[0]
    parts: dict[str, Any] = {}
    for name in ("vision_config", "audio_config", "perceiver_config"):
        settings = told.towers.get(name, {})
        if name in known and settings is not None:
            kind = told.vision if name == "vision_config" else ""
            parts[name] = _part(kinds[kind] if kind else _class_of(cls, name), settings)
    settings = {**TOKENS, **told.config}
    own = {n: value for n, value in settings.items() if n in known or n in vars(cls()) or n in told.config}
    if "text_config" not in known:
        flat = _FLAT.get(architecture, {})
        return tiny_configs.made(cls, {**tiny_models._small(cls), **own, **flat, **parts, **changes})
    text_class = kinds[told.text] if told.text else _class_of(cls, "text_config")
    special = {**tiny_overrides.OVERRIDES.get(told.text or architecture, {}), **_TEXT.get(architecture, {})}
    text = {name: value for name, value in special.items() if name in tiny_models.parameters(text_class)}
    text = {**tiny_models._small(text_class), **text, **changes}
    parts["text_config"] = tiny_configs.made(text_class, text)
    padding = {"pad_token_id": tiny_configs.SETTINGS["pad_token_id"]}  # 5.0's Llama 4 reads it, and its config has none
    config = tiny_configs.made(cls, {**padding, **own, **parts})
    if "vision_config" in parts:
        config.vision_config = parts["vision_config"]  # 4.50's Gemma 3 takes a dict only, and drops a config
    return config


_FLAT = {"phi4_multimodal": {"rope_scaling": None, "original_max_position_embeddings": 128, "sliding_window": None}}
_TEXT = {
    "qwen2_5_omni_thinker": {
        "rope_scaling": {"type": "default", "rope_type": "default", "mrope_section": [1, 1, 2]},
        "rope_parameters": tiny_overrides.MROPE["rope_parameters"],
    },
    "gemma4": {
        "sliding_window": 6,
        "use_bidirectional_attention": "vision",
        "num_hidden_layers": 2,
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma3": {"sliding_window": 6, "query_pre_attn_scalar": 8},
}


def _part(cls: Any, settings: dict[str, Any]) -> Any:
    known = tiny_models.parameters(cls)
    small = {name: value for name, value in {**tiny_configs.VISION, **TOKENS}.items() if name in known}
    return tiny_configs.made(cls, {**small, **{name: value for name, value in settings.items() if name in known}})


def _class_of(cls: Any, name: str) -> Any:
    found = getattr(cls, "sub_configs", {}).get(name)
    if inspect.isclass(found) and hasattr(found, "model_type") and found.model_type:
        return found
    return type(getattr(cls(), name))


# Their pictures have one size in versions whose forward takes no image_sizes.
_SAME_SIZE = {"pixtral:picture": FAMILIES["pixtral:picture"].make}


@functools.cache
def arguments(family: str) -> frozenset[str]:
    return frozenset(inspect.signature(model_class(family).forward).parameters)


@functools.cache
def is_expanded(family: str) -> bool:
    """Whether processors of this version write as many placeholders as a picture or sound has tokens."""
    # Up to 4.45 (Qwen2-Audio: 4.47) they write one, and the forward makes room for the others.
    code = inspect.unwrap(model_class(family).forward).__code__
    merges = any(name.startswith("_merge_input_ids_with_") for name in code.co_names)
    return not merges or "legacy_processing" in code.co_varnames


def holds_several(family: str) -> bool:
    # In Gemma 3 of 4.50, 4.51 and 4.53 several pictures of a document see each other, so fa2patch refuses them.
    if not family.startswith("gemma3"):
        return True
    cls = model_class(family)
    module = sys.modules[cls.__module__]
    by_distance = getattr(module, "token_type_ids_mask_function", None)
    if by_distance is not None and "tokens_per_image" in by_distance.__code__.co_varnames:
        return False
    make = getattr(cls, "_update_causal_mask", None)
    return make is None or "image_group_ids" in make.__code__.co_varnames


def document(family: str, *parts: int | str, seed: int = 0, first: int = 0) -> Document:
    """What a processor returns for one document, each tensor with a batch dimension where processors give one."""
    # parts: numbers of words, and "it" for a picture or sound. In PaliGemma the last words are the suffix.
    # first: the number of the first picture. Pictures differ in size by their numbers.
    told, generator, takes = FAMILIES[family], torch.Generator().manual_seed(seed), arguments(family)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    ids, media = [], []
    for part in parts:
        if isinstance(part, int):
            ids.append(torch.randint(3, 90, (part,), generator=generator))
            continue
        sized = told.make is not _SAME_SIZE.get(family) or "image_sizes" in takes
        count, made = told.make(draw, first + len(media) if sized else 0)
        ids += [torch.tensor([START]), torch.full((count if is_expanded(family) else 1,), told.of)]
        media.append(made)
    example = {"input_ids": torch.cat(ids)[None]}
    example["attention_mask"] = torch.ones_like(example["input_ids"])
    if "mm_token_type_ids" in takes:
        example["mm_token_type_ids"] = (example["input_ids"] == told.of).long()
    if told.both_ways and "token_type_ids" in takes:
        suffix = parts[-1] if isinstance(parts[-1], int) else 0
        example.update(_types(told.both_ways, example["input_ids"], suffix))
    for name in [name for name in (media[0] if media else ()) if name in takes]:
        values = [made[name] for made in media]
        along = 1 if "pixel_attention_mask" in media[0] else 0
        example[name] = torch.cat(_filled(values, along), dim=along)
    return example


def _types(both_ways: str, ids: torch.Tensor, suffix: int) -> Document:
    # With a prefix there are also labels, which only the suffix has.
    if both_ways == "pictures":
        return {"token_type_ids": (ids == PICTURE).long()}
    learned = torch.arange(ids.shape[1])[None] >= ids.shape[1] - suffix
    return {"token_type_ids": learned.long(), "labels": torch.where(learned, ids, -100)}


def _filled(values: list[torch.Tensor], along: int) -> list[torch.Tensor]:
    # Processors fill pictures of one call with zeros to the largest of each dimension.
    largest = [max(value.shape[dim] for value in values) for dim in range(values[0].dim())]
    filled = []
    for value in values:
        missing = [0 if dim == along else largest[dim] - value.shape[dim] for dim in range(value.dim())]
        filled.append(torch.nn.functional.pad(value, [side for fill in reversed(missing) for side in (0, fill)]))
    return filled


tiny_models.WITH_MEDIA.update(dict.fromkeys(FAMILIES, (model_class, config_of)))
