"""Find the mixers of a decoder: layers other than attention that carry state along the row."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Callable

import torch

from .._types import Function, Model
from . import caches, inspecting
from .facts import of_forward
from .find_layers import Layer, attention_layers
from .find_models import text_modules
from .seams import mixer

_NAMES = re.compile(
    r"Mamba|Mixer2?$|RecurrentBlock|Rwkv|Retention|ShortConv|DeltaNet|DeltaAttention|LightningAttention|LinearAttention"
    r"|LSTM(Backend|Layer)$"
)
_WEIGHTS = ("A_log", "dt_bias", "time_decay", "conv_kernel")
_ARGUMENTS = {"cache_params", "conv_state", "conv_states", "ssm_state", "recurrent_state", "recurrent_states"}


def mixer_layers(decoder: Model, attention: Sequence[Layer]) -> Iterator[Layer]:
    """Yield the layers through which :func:`mixers` can be given the boundaries.

    Such a layer is the mixer, or the nearest module around it, whose forward takes a mask and that holds no attention
    layer. In a model without attention, it may also take a ``cache_position`` or a cache instead of a mask.
    """
    names = [layer.name for layer in attention]
    ways = [mixer.takes_mask] if attention else [mixer.takes_mask, mixer.takes_positions, mixer.takes_cache]
    done: set[str] = set()
    for name in mixers(decoder, attention):
        parts = name.split(".")
        around = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
        around = [path for path in around if not any(f"{other}.".startswith(f"{path}.") for other in names)]
        path = next((path for taken in ways for path in around if _takes(decoder.get_submodule(path), taken)), "")
        if path and path not in done:
            done.add(path)
            module = decoder.get_submodule(path)
            yield Layer(path, "mixer", of_forward(module, mixer.by_document), module=module)


def carrier(decoder: Model, found: Iterable[Layer]) -> str:
    """Return the argument of a decoder without attention that reaches all of its mixers.

    The packed mask replaces this argument. It is ``"attention_mask"`` if no argument reaches them all.
    """
    given, found = inspecting.upstream_parameters(type(decoder).forward), list(found)
    cached = caches.taken_by(type(decoder).forward)  # xLSTM's decoder takes a cache, its layers take state
    ways = {"attention_mask": mixer.takes_mask, "cache_position": mixer.takes_positions}
    for name, taken in {**ways, **dict.fromkeys(cached, mixer.takes_cache)}.items():
        if name in given and all(_takes(layer.module, taken) for layer in found):
            return name
    return "attention_mask"


def _takes(module: torch.nn.Module, taken: Callable[[Function], bool]) -> bool:
    owner = inspecting.defining(type(module), "forward")
    return not inspecting.is_of_torch(owner) and taken(inspecting.forward_of(type(module)))


def mixers(decoder: Model, attention: Iterable[Layer] | None = None) -> dict[str, str]:
    """Return the modules that carry state along the row outside attention, as names and the evidence for it.

    ``attention`` are the decoder's attention layers. None looks for them.
    """
    attention = attention_layers(decoder) if attention is None else attention
    seams = {layer.name for layer in attention}  # the name of Kimi Linear's full attention matches too
    called = {name: type(module).__name__ for name, module in text_modules(decoder) if name and name not in seams}
    named = [name for name, cls in called.items() if _NAMES.search(cls) and "Norm" not in cls]
    innermost = {name for name in named if not any(other.startswith(f"{name}.") for other in named)}
    found: dict[str, str] = {}
    handed: dict[type, set[str]] = {}
    for name, module in text_modules(decoder):
        clue = "by its name" if name in innermost else _clue(module, handed)
        if clue and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = f"{type(module).__name__} ({clue})"
    return found


def _clue(module: torch.nn.Module, handed: dict[type, set[str]]) -> str | None:
    """Evidence that a module carries state along the row, or None."""
    cls = type(module)
    if isinstance(module, torch.nn.Conv1d) and module.kernel_size[0] > 1:
        return f"a convolution over {module.kernel_size[0]} tokens"
    if isinstance(module, (torch.nn.RNNBase, torch.nn.RNNCellBase)):
        return "recurrent"
    if inspecting.is_of_torch(cls):
        return None
    weights = [name for name in _WEIGHTS if name in module._parameters]
    if weights:
        return f"has {weights[0]}"
    if cls not in handed:
        handed[cls] = _ARGUMENTS & inspecting.upstream_parameters(cls.forward)
    has_layers = any(isinstance(child, torch.nn.ModuleList) for child in module.children())
    return f"is handed {sorted(handed[cls])[0]}" if handed[cls] and not has_layers else None
