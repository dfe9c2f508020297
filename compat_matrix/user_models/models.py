"""Makes a tiny config from a user's config.json, in the spelling of the installed Transformers.

Sizes are cut by the names of the config's arguments, and layers to the shortest prefix that has every kind of layer.
All else, such as rope scaling, windows and the structure of experts, stays. An architecture's name that ends in
``.json`` is the path of such a file.
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

from .. import tiny_configs
from . import layers, rope, sizes

# They do not change what the model computes.
HOUSEKEEPING = {
    "architectures", "attn_implementation", "dtype", "id2label", "label2id", "model_type", "output_attentions",
    "output_hidden_states", "problem_type", "return_dict", "torch_dtype", "torchscript", "transformers_version",
    "use_bfloat16", "use_return_dict",
}  # fmt: skip


class BadConfig(ValueError):
    """A file is not a model's config.json. The message says what was expected."""


def is_file(architecture: str) -> bool:
    return architecture.endswith(".json")


def find(path: str | Path) -> Path:
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    try:
        there = file.is_file()
    except OSError as error:
        raise BadConfig(f"{file}: looked for a config.json, which cannot be read: {error.strerror}") from None
    if not there:
        raise BadConfig(
            f"{file}: looked for a Hugging Face config.json, found nothing{_beside(file)}. Give the file, or the "
            "folder that holds it: what save_pretrained wrote, or the model's config.json from the Hub."
        )
    return file


def _beside(file: Path) -> str:
    if not file.parent.is_dir():
        return f", and no folder {file.parent}"
    names = sorted(found.name for found in file.parent.iterdir())
    configs = [name for name in names if name.endswith(".json")]
    if configs:
        return f" of that name; its folder holds {', '.join(configs[:5])}"
    return "" if names else ": its folder is empty"


def read(path: str | Path) -> dict[str, Any]:
    file = find(path)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadConfig(f"{file}: looked for a JSON object, found one that cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise BadConfig(f"{file}: looked for a JSON object, found no JSON ({error}). Is it the config.json?") from None
    if not isinstance(config, dict):
        raise BadConfig(f"{file}: looked for a JSON object, found a {type(config).__name__}. Is it the config.json?")
    if not isinstance(config.get("model_type"), str):
        keys = ", ".join(sorted(config)[:5]) or "no keys at all"
        raise BadConfig(
            f'{file}: looked for "model_type", which names the architecture (such as "llama"), found {keys}. Add it, '
            "or hand over the config.json of the model itself, not its adapter's or tokenizer's."
        )
    return config


def kind(architecture: str) -> str:
    return str(read(architecture)["model_type"]) if is_file(architecture) else architecture


def config_of(path: str | Path, config_class: Any, **changes: Any) -> Any:
    # changes: for the language model's part of the config
    settings = shrunk(config_class, read(path))
    text = settings["text_config"] if isinstance(settings.get("text_config"), dict) else settings
    text.update(layers.stretched(text, changes))
    return tiny_configs.made(config_class, settings)


def shrunk(config_class: Any, config: dict[str, Any]) -> dict[str, Any]:
    settings = fitted(config_class, config)
    nested = {name: _nested(config_class, name, value) for name, value in settings.items() if _is_config(name, value)}
    settings.update(layers.cut(config_class, settings))
    settings.update(sizes.cut(config_class, settings))
    return {**settings, **nested}


def fitted(config_class: Any, config: dict[str, Any]) -> dict[str, Any]:
    # The config keeps its full size.
    taken = _known(config_class) - _unheeded(config_class)
    return {name: value for name, value in _spelled(config_class, config).items() if name in taken}


def notes(path: str | Path, config_class: Any) -> list[str]:
    unknown = dropped(config_class, read(path))
    return [f"left out of the config: {', '.join(unknown)}"] if unknown else []


def dropped(config_class: Any, config: dict[str, Any]) -> list[str]:
    # Some keys the installed Transformers does not know, others are left out here.
    spelled = _spelled(config_class, config)
    unknown = {*spelled} - {*fitted(config_class, config)} - _unheeded(config_class)
    found = [name for name in unknown if not name.startswith("_") and spelled[name] is not None]
    for name, value in spelled.items():
        inner = _class_of(config_class, name, value) if _is_config(name, value) else dict
        if hasattr(inner, "model_type"):
            found += [f"{name}.{key}" for key in dropped(inner, value)]
    return sorted(found)


def _spelled(cls: Any, config: dict[str, Any]) -> dict[str, Any]:
    return layers.respelt(cls, rope.respelt(cls, _flat_or_nested(cls, config)))


def _known(cls: Any) -> set[str]:
    # Some keys are read with getattr, so all words in the class's and in the model's code count.
    words: set[str] = set(sizes.defaults(cls))
    for name in {cls.__module__, cls.__module__.replace(".configuration_", ".modeling_")}:
        try:
            file = Path(str(importlib.import_module(name).__file__))
        except ImportError:
            continue
        words.update(re.findall(r"\w+", file.read_text(encoding="utf-8")))
    if "rope_parameters" in words:  # such a class takes the older spelling too
        words |= {"rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor"}
    return words - {"auto_map", "quantization_config"}


def _unheeded(cls: Any) -> set[str]:
    # Housekeeping has no effect. Neither has what the base class takes, except what this class takes by name.
    base = next(base for base in cls.__mro__ if base.__name__ in ("PretrainedConfig", "PreTrainedConfig"))
    everyones = {*base().to_dict()} - {"is_decoder", "tie_word_embeddings", "pad_token_id"}
    return HOUSEKEEPING | (everyones - {*sizes.defaults(cls)})


def _is_config(name: str, value: Any) -> bool:
    # per_layer_config, whose keys are numbers, is no config.
    named = name.endswith("_config") and name != "quantization_config"
    return named and isinstance(value, dict) and not all(str(key).isdigit() for key in value)


def _class_of(cls: Any, name: str, value: dict[str, Any]) -> Any:
    kinds = importlib.import_module("transformers").CONFIG_MAPPING
    declared = getattr(cls, "sub_configs", {}).get(name)
    if value.get("model_type") in kinds and getattr(declared, "model_type", "") in ("", value["model_type"]):
        return kinds[value["model_type"]]
    if declared is not None and declared.__name__ != "AutoConfig":
        return declared
    try:
        return type(getattr(cls(), name))
    except Exception:  # the class cannot be made without arguments, or lacks this config
        return dict


def _nested(cls: Any, name: str, value: dict[str, Any]) -> dict[str, Any]:
    inner = _class_of(cls, name, value)
    if not hasattr(inner, "model_type"):
        return sizes.of_dict(value)
    settings = shrunk(inner, value)
    if name != "text_config":  # a vision or audio side
        known = {*sizes.defaults(inner), *settings}
        settings.update({key: size for key, size in tiny_configs.VISION.items() if key in known})
    return {"model_type": inner.model_type, **settings}


def _flat_or_nested(cls: Any, config: dict[str, Any]) -> dict[str, Any]:
    # Versions differ in whether the text side of a vision-language config is nested. Qwen2-VL has had both.
    apart = "text_config" in sizes.defaults(cls)
    if apart == isinstance(config.get("text_config"), dict) or "vision_config" not in config:
        return config
    if not apart:
        rest = {name: value for name, value in config.items() if name != "text_config"}
        return {**config["text_config"], **rest}
    own = {*sizes.defaults(cls)} | {"model_type"}
    text = {name: value for name, value in config.items() if name not in own}
    return {**{name: value for name, value in config.items() if name in own}, "text_config": text}
