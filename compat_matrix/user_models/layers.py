"""Cuts a user's config down to few layers: the shortest prefix that has every kind of layer of the model."""

from __future__ import annotations

from typing import Any

from . import sizes

NAMES = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
# If a longer prefix is needed, one layer of each kind is picked instead.
LONGEST = 8

# Arguments with these endings change the kind of layer every N layers.
PERIODS = ("_pattern", "_interval", "_period", "_step", "_every_n_layers", "_layer_freq")

# These arguments change the kind of layer from layer N on.
FIRST = ("first_k_dense_replace", "max_window_layers")


def name_of(settings: dict[str, Any]) -> str | None:
    return next((name for name in NAMES if isinstance(settings.get(name), int)), None)


def cut(cls: Any, settings: dict[str, Any]) -> dict[str, Any]:
    everything = {**sizes.defaults(cls), **settings}
    name = name_of(everything)
    if name is None:
        return {}
    total = everything[name]
    given = _per_layer(settings, total)
    lists = {**_computed(cls, settings, total), **given}
    picked = _picked(everything, lists, total)
    if isinstance(everything.get("attention_types"), list):  # GPT-Neo: [[["global", "local"], 12]]
        kinds = everything["attention_types"][0][0]
        return {name: len(kinds), "attention_types": [[kinds, 1]], "attention_layers": kinds}
    changes: dict[str, Any] = {}
    if picked != list(range(len(picked))):  # not a prefix, so "from layer N on" must start earlier
        given = {key: value for key, value in lists.items() if key in everything}
        changes.update({key: 1 for key in FIRST if isinstance(everything.get(key), int) and everything[key] > 1})
    shared = everything.get("num_kv_shared_layers")
    if shared:
        changes["num_kv_shared_layers"] = len(picked)
    if shared or any("hybrid" in values for values in lists.values()):  # some layers share with an earlier one
        picked = picked * 2
    changes[name] = len(picked)
    for key, values in given.items():
        part = [values[layer] for layer in picked]
        changes[key] = "".join(part) if isinstance(values, str) else part
    for key, layers in _indices(settings, total).items():
        changes[key] = [place for place, layer in enumerate(picked) if layer in layers]
    for key, layers in _by_number(settings).items():
        changes[key] = {str(place): layers[layer] for place, layer in enumerate(picked) if layer in layers}
    return changes


def stretched(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    # Another number of layers needs other lists with one value per layer, so the user's lists repeat.
    name = next((name for name in NAMES if name in changes), None)
    if name is None or not settings.get(name):
        return changes
    lists = {key: value for key, value in _per_layer(settings, settings[name]).items() if key not in changes}
    longer = {key: (value * changes[name])[: changes[name]] for key, value in lists.items()}
    return {**longer, **changes}


def respelt(cls: Any, config: dict[str, Any]) -> dict[str, Any]:
    # Some versions take a period or a first layer in place of a list with the kind of each layer.
    takes, config = sizes.defaults(cls), dict(config)
    kinds = config.get("layer_types")
    pattern = "sliding_window_pattern"
    if isinstance(kinds, list) and "layer_types" not in takes and pattern in takes and "full_attention" in kinds:
        config.setdefault(pattern, kinds.index("full_attention") + 1)
        del config["layer_types"]
    experts = config.get("mlp_layer_types")
    first = "first_k_dense_replace"
    if isinstance(experts, list) and "mlp_layer_types" not in takes and first in takes and "sparse" in experts:
        config.setdefault(first, experts.index("sparse"))
        del config["mlp_layer_types"]
    return config


def _computed(cls: Any, settings: dict[str, Any], total: int) -> dict[str, Any]:
    """The per-layer lists that this version's config class computes from the settings."""
    try:
        config = cls(**settings)
    except Exception:  # the error is reported when the model is built
        return {}
    found = {**vars(config), "layer_types": getattr(config, "layer_types", None)}
    return _per_layer({**found, "layers_block_type": getattr(config, "layers_block_type", None)}, total)


def _per_layer(settings: dict[str, Any], total: int) -> dict[str, Any]:
    return {
        name: value
        for name, value in settings.items()
        if (isinstance(value, (list, tuple)) or (isinstance(value, str) and "pattern" in name))
        and len(value) == total > 0
        and not any(isinstance(part, (dict, list)) for part in value)
    }


def _indices(settings: dict[str, Any], total: int) -> dict[str, Any]:
    # Some lists hold indices of layers, such as mlp_only_layers.
    return {
        name: value
        for name, value in settings.items()
        if isinstance(value, list)
        and any(word in name for word in ("layers", "layer_ids", "layer_indices", "idxs"))
        and len(value) != total
        and all(isinstance(layer, int) and 0 <= layer < total for layer in value)
    }


def _by_number(settings: dict[str, Any]) -> dict[str, Any]:
    # The keys of some dictionaries are indices of layers, such as those of Gemma 4's per_layer_config.
    return {
        name: {int(key): part for key, part in value.items()}
        for name, value in settings.items()
        if isinstance(value, dict) and value and all(str(key).isdigit() for key in value)
    }


def _picked(settings: dict[str, Any], lists: dict[str, Any], total: int) -> list[int]:
    indices = [*_indices(settings, total).values(), *_by_number(settings).values()]
    seen: dict[Any, int] = {}
    for layer in range(total):
        kind = (*(str(values[layer]) for values in lists.values()), *(layer in layers for layers in indices))
        seen.setdefault(kind, layer)
    periods = [
        value
        for name, value in settings.items()
        if name.endswith(PERIODS) and isinstance(value, int) and not isinstance(value, bool)
    ]
    starts = [settings[name] + 1 for name in FIRST[:1] if isinstance(settings.get(name), int)]
    if settings.get("use_sliding_window") and isinstance(settings.get("max_window_layers"), int):
        starts.append(settings["max_window_layers"] + 1)
    needed = max([2, *(layer + 1 for layer in seen.values()), *periods, *(start for start in starts if start <= total)])
    if needed <= min(LONGEST, total):
        return list(range(needed))
    chosen = sorted(seen.values())[:LONGEST]
    return chosen if len(chosen) > 1 else list(range(min(2, total)))
