"""Tiny models with pictures, and documents for them like those of a processor, without a processor."""

from __future__ import annotations

import importlib
import inspect

import torch

from compat_matrix import tiny_configs, tiny_models, tiny_overrides
from compat_matrix.media_families import FILM, PICTURE, START, TOKENS
from fa2patch.upstream.find_models import models

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "glm4v")
_NAMES = {"qwen3_5": "Qwen3_5ForConditionalGeneration", "glm4v": "Glm4vForConditionalGeneration"}
_TEXT = {"rope_scaling", "rope_parameters"}


def is_present(family):
    if family not in _NAMES:
        return tiny_models.is_present(family)
    return hasattr(importlib.import_module("transformers"), _NAMES[family])


def build(family, implementation="eager", **changes):
    # The weights are scaled up. The model is in float64 and eval mode.
    if family not in _NAMES:
        return tiny_models.build(family, implementation, dtype=torch.float64, **changes)
    cls = getattr(importlib.import_module("transformers"), _NAMES[family])
    text_class = type(cls.config_class().text_config)
    known = tiny_models.parameters(text_class)
    mrope = {name: value for name, value in tiny_overrides.MROPE.items() if name in _TEXT & set(known)}
    if family == "glm4v":  # heads are so small that all dimensions must rotate, or an axis would have none
        mrope = {name: {**value, "type": "default", "partial_rotary_factor": 1.0} for name, value in mrope.items()}
        mrope["partial_rotary_factor"] = 1.0
    text = {"model_type": text_class.model_type, **tiny_models._small(text_class), **mrope, **changes}
    own = tiny_models.parameters(cls.config_class)
    tokens = {name: value for name, value in TOKENS.items() if name in own}
    vision = tiny_models._vision(None, None, cls.config_class)
    config = tiny_configs.made(cls.config_class, {"text_config": text, "vision_config": vision, **tokens})
    model = tiny_models._load(cls, config, implementation).float()
    tiny_models.scale_up(model)
    return model.double().eval()


def document(model, *parts, seed=0):
    # It looks as a processor's output does. ``parts`` are numbers of words, or grids (1, height, width) of pictures in
    # patches. A film is a grid after the word "film".
    generator = torch.Generator().manual_seed(seed)
    vision = model.config.vision_config
    merged = vision.spatial_merge_size**2
    ids, types, found = [], [], {}
    for part in parts:
        if isinstance(part, int):
            ids.append(torch.randint(3, 90, (part,), generator=generator))
            types.append(torch.zeros(part, dtype=torch.long))
            continue
        film, grid = part[0] == "film", part[-3:]
        count = torch.tensor(grid).prod().item()
        kind, name = ("video", "pixel_values_videos") if film else ("image", "pixel_values")
        frames = grid[0] if film and model.config.model_type not in ("qwen2_vl", "qwen2_5_vl") else 1
        for _ in range(frames):  # from Qwen3-VL on, words (a time stamp) separate a film's frames
            ids += [torch.tensor([9, START]), torch.full((count // merged // frames,), FILM if film else PICTURE)]
            types += [torch.zeros(2, dtype=torch.long), torch.full((count // merged // frames,), 2 if film else 1)]
        channels = getattr(vision, "in_channels", None) or vision.in_chans
        size = channels * vision.temporal_patch_size * vision.patch_size**2
        found.setdefault(f"{kind}_grid_thw", []).append(torch.tensor([grid]))
        found.setdefault(name, []).append(torch.randn(count, size, generator=generator))
    example = {"input_ids": torch.cat(ids)[None], **{name: torch.cat(values) for name, values in found.items()}}
    example["attention_mask"] = torch.ones_like(example["input_ids"])
    if takes_types(model):
        example["mm_token_type_ids"] = torch.cat(types)[None]
    return example


def takes_types(model):
    return "mm_token_type_ids" in inspect.signature(type(model).forward).parameters


def alone(model, example, **call):
    # The logits are [tokens, vocabulary].
    if hasattr(model, "get_rope_index"):  # up to 4.48 only generate() calls it
        grids = {name: example[name] for name in example if name.endswith(("_grid_thw", "_grid_ts"))}
        ids = model.get_rope_index(example["input_ids"], attention_mask=example["attention_mask"], **grids)[0]
        call = {"position_ids": ids, **call}
    taken = {name: value for name, value in example.items() if name != "mm_token_type_ids" or takes_types(model)}
    return model(**taken, use_cache=False, **call).logits[0]


def decoder(model):
    # The model that loops over the text layers.
    return models(model)[-1]
