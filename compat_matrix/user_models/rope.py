"""Respells a config's rotary embeddings: ``rope_theta`` and ``rope_scaling`` before 5.0, then ``rope_parameters``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from . import sizes

OLDER = ("rope_scaling", "rope_theta", "rope_local_base_freq")


def respelt(cls: Any, config: dict[str, Any]) -> dict[str, Any]:
    config = dict(config)
    if "rope_parameters" in sizes.defaults(cls):
        return _newer(cls, config)
    parameters = config.pop("rope_parameters", None)
    if isinstance(parameters, dict) and parameters:
        config = {**_older(cls, parameters), **config}
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict):
        config["rope_scaling"] = _scaling(cls, scaling)
    return config


def _newer(cls: Any, config: dict[str, Any]) -> dict[str, Any]:
    # This version's own config class converts the older spelling.
    if not any(name in config for name in OLDER):
        return config
    rotary = ("rope", "rotary", "layer", "head", "hidden_size", "position", "sliding")
    about = {name: value for name, value in config.items() if any(word in name for word in rotary)}
    try:
        parameters = cls(**about).rope_parameters
    except Exception:  # the error is reported when the model is built
        return config
    return {**{name: value for name, value in config.items() if name not in OLDER}, "rope_parameters": parameters}


def _older(cls: Any, parameters: dict[str, Any]) -> dict[str, Any]:
    takes = sizes.defaults(cls)
    local: dict[str, Any] = {}
    if all(isinstance(value, dict) for value in parameters.values()):  # one for each kind of layer
        local = parameters.get("sliding_attention", {})
        parameters = parameters.get("full_attention") or next(iter(parameters.values()))
    apart = ("rope_theta", "partial_rotary_factor")
    told = {name: parameters.get(name) for name in (*apart, "original_max_position_embeddings")}
    settings = {name: value for name, value in told.items() if name in takes and value is not None}
    scaling = {name: value for name, value in parameters.items() if name not in apart}
    if local.get("rope_theta") is not None:
        settings["rope_local_base_freq"] = local["rope_theta"]
    plain = scaling.get("rope_type", scaling.get("type", "default")) == "default" and "mrope_section" not in scaling
    settings["rope_scaling"] = None if plain else scaling
    return settings


def _scaling(cls: Any, scaling: dict[str, Any]) -> dict[str, Any]:
    # Config files up to 4.42 validate a scaling themselves: they take "type", and no extra keys.
    kind = scaling.get("rope_type", scaling.get("type"))
    rest = {name: value for name, value in scaling.items() if name not in ("type", "rope_type")}
    file = sys.modules[cls.__module__].__file__
    if "_rope_scaling_validation" not in Path(str(file)).read_text(encoding="utf-8"):
        return {"rope_type": kind, **({"type": kind} if "type" in scaling else {}), **rest}
    if kind == "longrope":
        needed = ("short_factor", "long_factor")
        return {"type": kind, **{name: rest[name] for name in needed if name in rest}}
    if kind in ("linear", "dynamic"):
        return {"type": kind, "factor": float(rest.get("factor", 1.0))}
    return {"type": kind, **rest}
