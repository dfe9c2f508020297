"""Which windows, chunks and local layers a config has: the one place that knows.

A config says how far its layers look under many names. A row of ``KINDS`` is one of them; ``of`` says which of them a
config has, and raises where it finds a name that nobody has looked at, so that the next one is not passed over.
"""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import dataclass
from typing import Any, Callable

from .. import tiny_models

Sees = Callable[[int, int, int], bool]
"""Whether a query sees a key of its document: given their places in it, and what the config's argument says."""


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
    """One argument of a config that keeps a query from tokens of its own document.

    Attributes:
        name: the config's argument, a number of tokens.
        sees: what it means.
        sizes: values to try: nothing but itself, less than a document, as much as the longest, more.
    """

    name: str
    sees: Sees
    sizes: tuple[int, ...] = (1, 3, 5, 12, 40)

    def hides(self, length: int, size: int, encoder: bool = False) -> bool:
        """Whether some token of a document of that length does not see one that it would see without."""
        pairs = ((i, j) for i in range(length) for j in range(length if encoder else i + 1))
        return not all(self.sees(i, j, size) for i, j in pairs)


KINDS = {
    "sliding_window": Kind("sliding_window", _window),
    "window_size": Kind("window_size", _window),
    "attention_window_size": Kind("attention_window_size", _window),
    "attention_chunk_size": Kind("attention_chunk_size", _chunk),
    "local_attention": Kind("local_attention", _half_to_each_side, (2, 6, 12, 40)),
}
DECODERS = {"local_attention": Kind("local_attention", _half_a_window, (2, 6, 12, 24, 48))}
"""What means something else where attention looks back only (ModernBERT's decoder: half of it is its window)."""

LAYERS = {
    "attention_layers", "attention_types", "block_types", "layer_types", "layers_block_type", "max_window_layers",
    "mlp_layer_types", "mtp_layer_types", "mtp_layers_block_type", "mtp_mlp_layer_types",
    "prefix_dense_sliding_window_pattern", "sliding_window_pattern", "use_sliding_window",
}  # fmt: skip
"""Names that say which layers are of which kind."""

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
"""Names that sound like windows and are none, and what they are."""

_SOUNDS_LIKE_ONE = re.compile(r"window|chunk|local|sliding|layer_types|block_type|attention_(types|layers)")
_LOCAL_LAYER = re.compile(r"[\"'](\w*(?:sliding|chunked)(?:_attention)?)[\"']")
_GLOBAL_LAYER = re.compile(r"full_attention|hybrid")


class UnknownWindow(Exception):
    """A config has something that sounds like a window, and this file does not say what it is."""


def of(architecture: str) -> list[Kind]:
    """The kinds that an architecture's config can be given.

    Raises:
        UnknownWindow: the config has a name that is in no table of this file.
    """
    config = text_config(architecture)
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


def text_config(architecture: str, **changes: Any) -> Any:
    config = tiny_models.config_of(architecture, **changes)
    return getattr(config, "text_config", config)


@dataclass(frozen=True)
class Way:
    """A way in which a config is told which layers have a window.

    Attributes:
        changes: its arguments.
        layers: how many layers have one then; None where that is not known here.
        one: the arguments of the same name with which one layer of two has one. Code that gives it to both does not
            know that name, and defines nothing about it.
    """

    changes: dict[str, Any]
    layers: int | None = None
    one: dict[str, Any] | None = None


def ways(architecture: str) -> dict[str, Way]:
    """Every way that the config has, by name."""
    config = text_config(architecture)
    takes = tiny_models.parameters(type(config))
    on: dict[str, Any] = {"use_sliding_window": True} if "use_sliding_window" in takes else {}
    found: dict[str, Way] = {}
    types = _with_a_local_layer(architecture, getattr(config, "layer_types", None) if "layer_types" in takes else None)
    if types is not None:
        found["layer_types"] = Way({**on, "layer_types": types})
    unsaid: dict[str, Any] = {"layer_types": None} if "layer_types" in takes else {}
    if "max_window_layers" in takes:  # some versions count the layers without a window from below, some those with one
        one = {**on, **unsaid, "max_window_layers": 1}
        found["max_window_layers=1"] = Way(one, 1, one)
        for number in (0, 2):
            found[f"max_window_layers={number}"] = Way({**one, "max_window_layers": number}, None, one)
    if "sliding_window_pattern" in takes:
        found["sliding_window_pattern"] = Way({**on, **unsaid, "sliding_window_pattern": 2})
    return found or {"every layer": Way(on)}


def _with_a_local_layer(architecture: str, types: list[str] | None) -> list[str] | None:
    """``layer_types`` with a local layer in it, under the name that the modeling file has for one."""
    if not types or any(_LOCAL_LAYER.fullmatch(f'"{kind}"') for kind in types):
        return types and list(types)
    names = _LOCAL_LAYER.findall(inspect.getsource(tiny_models.modeling(architecture)))
    places = [index for index, kind in enumerate(types) if _GLOBAL_LAYER.fullmatch(kind)]
    if not names or not places:
        return None
    return [names[0] if index == places[0] else kind for index, kind in enumerate(types)]


def reads(architecture: str, kind: Kind) -> bool:
    """Whether the modeling file speaks of that argument at all."""
    return _is_in(kind.name, tiny_models.modeling(architecture))


def spoken_of(name: str, config: Any) -> bool:
    """Whether the files of a model speak of an argument: a config keeps whatever it is given."""
    package = type(config).__module__.rpartition(".")[0]
    modules = [module for path, module in sys.modules.items() if path.startswith(f"{package}.") and module]
    return any(
        _is_in(name, module) for module in modules if re.search(r"\.(configuration|modeling)_\w+$", module.__name__)
    )


def _is_in(name: str, module: Any) -> bool:
    return re.search(rf"\b{name}\b", inspect.getsource(module)) is not None
