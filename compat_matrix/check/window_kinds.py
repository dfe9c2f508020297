"""The windows, chunks and local layers that a config can have.

Configs use many argument names for how far layers look; ``KINDS`` lists them. :func:`of` returns the kinds that a
config has. It raises an error for an unknown name that sounds like a window, so that new ones are not overlooked.
"""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import dataclass
from typing import Any, Callable

from .. import tiny_models

# Whether a query sees a key of its document, called with their positions in it and the config's argument.
Sees = Callable[[int, int, int], bool]


def _window(query: int, key: int, size: int) -> bool:
    return 0 <= query - key < size


def _chunk(query: int, key: int, size: int) -> bool:
    return key <= query and query // size == key // size


def _half_a_window(query: int, key: int, size: int) -> bool:
    return 0 <= query - key < size // 2


def _half_to_each_side(query: int, key: int, size: int) -> bool:
    return abs(query - key) <= size // 2


@dataclass(frozen=True)
class Kind:
    """A config argument that hides tokens of a query's own document, by its definition."""

    name: str
    sees: Sees
    # in tokens: a token itself, less than a document, as much as the longest document, and more
    sizes: tuple[int, ...] = (1, 3, 5, 12, 40)

    def hides(self, length: int, size: int, encoder: bool = False) -> bool:
        pairs = ((i, j) for i in range(length) for j in range(length if encoder else i + 1))
        return not all(self.sees(i, j, size) for i, j in pairs)


KINDS = {
    "sliding_window": Kind("sliding_window", _window),
    "window_size": Kind("window_size", _window),
    "attention_window_size": Kind("attention_window_size", _window),
    "attention_chunk_size": Kind("attention_chunk_size", _chunk),
    "local_attention": Kind("local_attention", _half_to_each_side, (2, 6, 12, 40)),
}
# These mean something else in causal models: the window of ModernBERT's decoder is half of it.
DECODERS = {"local_attention": Kind("local_attention", _half_a_window, (2, 6, 12, 24, 48))}

# These arguments state the kinds of layers.
LAYERS = {
    "attention_layers", "attention_types", "block_types", "layer_types", "layers_block_type", "max_window_layers",
    "mlp_layer_types", "mtp_layer_types", "mtp_layers_block_type", "mtp_mlp_layer_types",
    "prefix_dense_sliding_window_pattern", "sliding_window_pattern", "use_sliding_window",
}  # fmt: skip

# These sound like windows and are none. Each has its meaning.
NO_WINDOWS = {
    "chunk_size": "a mixer computes so many tokens at a time",
    "chunk_size_feed_forward": "a block without attention computes so many tokens at a time",
    "chunkwise_kernel": "a mixer's kernel",
    "local_rope_theta": "rotary embeddings of local layers",
    "mamba_chunk_size": "a mixer computes so many tokens at a time",
    "max_inference_chunksize": "a mixer computes so many tokens at a time",
    "num_local_experts": "experts",
    "rope_local_base_freq": "rotary embeddings of local layers",
}

_SOUNDS_LIKE_ONE = re.compile(r"window|chunk|local|sliding|layer_types|block_type|attention_(types|layers)")
_LOCAL_LAYER = re.compile(r"[\"'](\w*(?:sliding|chunked)(?:_attention)?)[\"']")
_GLOBAL_LAYER = re.compile(r"full_attention|hybrid")


class UnknownWindow(Exception):
    """A config has an argument that sounds like a window and that this file does not know."""


def of(architecture: str) -> list[Kind]:
    config = tiny_models.text_config_of(architecture)
    takes = tiny_models.parameters(type(config))
    names = {name.lstrip("_") for name in {*vars(config), *takes} if _SOUNDS_LIKE_ONE.search(name)}
    unknown = [name for name in sorted(names - KINDS.keys() - LAYERS - NO_WINDOWS.keys()) if spoken_of(name, config)]
    if unknown:
        raise UnknownWindow(
            f"{type(config).__name__} has {', '.join(unknown)}: expected names that compat_matrix/check/window_kinds.py"
            " knows. Look at what Transformers does with them, and add them to KINDS, LAYERS or NO_WINDOWS."
        )
    kinds = KINDS if tiny_models.is_encoder(architecture) else {**KINDS, **DECODERS}
    return [kind for name, kind in kinds.items() if name in takes]


@dataclass(frozen=True)
class Way:
    """A way to tell a config which layers have a window."""

    changes: dict[str, Any]  # the config arguments
    layers: int | None = None  # how many layers then have a window; None if that is not known here
    # Arguments of the same name that give one of two layers a window. Eager code that gives both layers a window does
    # not implement the name, so it is not compared with.
    one: dict[str, Any] | None = None


def ways(architecture: str) -> dict[str, Way]:
    config = tiny_models.text_config_of(architecture)
    takes = tiny_models.parameters(type(config))
    on: dict[str, Any] = {"use_sliding_window": True} if "use_sliding_window" in takes else {}
    found: dict[str, Way] = {}
    types = _with_a_local_layer(architecture, getattr(config, "layer_types", None) if "layer_types" in takes else None)
    if types is not None:
        found["layer_types"] = Way({**on, "layer_types": types})
    unsaid: dict[str, Any] = {"layer_types": None} if "layer_types" in takes else {}
    # some versions give the first max_window_layers layers no window, others give the window to those
    if "max_window_layers" in takes:
        one = {**on, **unsaid, "max_window_layers": 1}
        found["max_window_layers=1"] = Way(one, 1, one)
        for number in (0, 2):
            found[f"max_window_layers={number}"] = Way({**one, "max_window_layers": number}, None, one)
    if "sliding_window_pattern" in takes:
        found["sliding_window_pattern"] = Way({**on, **unsaid, "sliding_window_pattern": 2})
    return found or {"every layer": Way(on)}


def _with_a_local_layer(architecture: str, types: list[str] | None) -> list[str] | None:
    # The local layer is named as in the modeling file.
    if not types or any(_LOCAL_LAYER.fullmatch(f'"{kind}"') for kind in types):
        return types and list(types)
    names = _LOCAL_LAYER.findall(inspect.getsource(tiny_models.modeling(architecture)))
    places = [index for index, kind in enumerate(types) if _GLOBAL_LAYER.fullmatch(kind)]
    if not names or not places:
        return None
    return [names[0] if index == places[0] else kind for index, kind in enumerate(types)]


def reads(architecture: str, kind: Kind) -> bool:
    return _is_in(kind.name, tiny_models.modeling(architecture))


def spoken_of(name: str, config: Any) -> bool:
    # That a config has an argument proves nothing, as it keeps any argument.
    package = type(config).__module__.rpartition(".")[0]
    modules = [module for path, module in sys.modules.items() if path.startswith(f"{package}.") and module]
    return any(
        _is_in(name, module) for module in modules if re.search(r"\.(configuration|modeling)_\w+$", module.__name__)
    )


def _is_in(name: str, module: Any) -> bool:
    return re.search(rf"\b{name}\b", inspect.getsource(module)) is not None
