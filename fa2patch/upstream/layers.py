"""Where things are in a model, found by looking: the forwards that a call goes through, attention layers, mixers."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .seams import function, fused, interface, method
from .traits import mixing

Replaced = tuple[str, Any, str]
"""Which replacement (a key of ``patching._MAKERS``), the owner, the attribute."""

_MIXER = re.compile(
    r"Mamba|Mixer2?$|RecurrentBlock|Rwkv|Retention|ShortConv|DeltaNet|DeltaAttention|LightningAttention|LinearAttention"
    r"|LSTM(Backend|Layer)$"
)
_MIXER_WEIGHTS = ("A_log", "dt_bias", "time_decay", "conv_kernel")
_MIXER_ARGUMENTS = {"cache_params", "conv_state", "conv_states", "ssm_state", "recurrent_state", "recurrent_states"}


@dataclass(frozen=True)
class Attention:
    """An attention layer: what is replaced to reach it, and what else that needs.

    Attributes:
        name: the layer's name in the decoder.
        module: the layer.
        seam: ``"interface"``, ``"function"`` or ``"method"``.
        replaced: the attribute that its boundaries come through.
        others: attributes that this seam needs replaced as well.
    """

    name: str
    module: Any
    seam: str
    replaced: Replaced
    others: tuple[Replaced, ...] = ()

    @property
    def fused(self) -> bool:
        """Whether its function is handed query, key and value in one, and unpads on its own where it is flash."""
        kind, owner, attribute = self.replaced
        return kind == "table" and fused.is_fused(vars(owner)[attribute][function.FLASH])


def is_transformers_model(module: Any) -> bool:
    return any(
        cls.__name__ == "PreTrainedModel" and cls.__module__.split(".")[0] == "transformers"
        for cls in type(module).__mro__
    )


def models(model: Any) -> list[Any]:
    """The models whose ``forward`` a call goes through, the outermost first, the one that loops over the layers last.

    They are those that hold the embedding of the input ids: of ``GPT2LMHeadModel`` that and its ``transformer``, of a
    vision-language model its text side, and never a vision tower.
    """
    try:
        embedding = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        embedding = None
    path = [
        module
        for module in model.modules()
        if is_transformers_model(module) and any(embedding is inner for inner in module.modules())
    ]
    if path:
        return path
    base = getattr(model, model.base_model_prefix, model) if model.base_model_prefix else model
    return [model] if base is model else [model, base]


def attention_layers(decoder: Any) -> Iterator[Attention]:
    """Every attention layer of a decoder that offers a seam."""
    seams: dict[type, tuple[str, Replaced, tuple[Replaced, ...]] | None] = {}
    for name, module in decoder.named_modules():
        cls = type(module)
        if cls not in seams:
            seams[cls] = _seam_of(cls)
        found = seams[cls]
        if found is not None:
            yield Attention(name, module, *found)


def _seam_of(cls: type) -> tuple[str, Replaced, tuple[Replaced, ...]] | None:
    """The seam of a class of modules, what is replaced, and what else that needs; None where it offers none."""
    if cls.__module__.startswith("torch.") or not any("forward" in vars(base) for base in cls.__mro__):
        return None
    owner = defining(cls, "forward")
    home = sys.modules.get(owner.__module__)
    if home is None:
        return None
    flash, forward = method.flash_class(home, cls), inspect.unwrap(vars(owner)["forward"])
    table = function.table_name(home, forward)
    if table is not None:
        fuses = fused.is_fused(vars(home)[table][function.FLASH])
        return "function", ("table", home, table), () if fuses else (("function", home, function.NAME),)
    if interface.is_seam(home, forward):
        others: tuple[Replaced, ...] = (("eager", home, interface.EAGER),) if hasattr(home, interface.EAGER) else ()
        return "interface", ("registry", home, interface.REGISTRY), others
    if flash is None:
        return None
    scope = sys.modules[defining(flash, "forward").__module__]
    if method.is_method_seam(flash):
        return "method", ("layer", owner, "forward"), (("window_flag", scope, method.WINDOW_FLAG),)
    return "function", ("layer", owner, "forward"), (("function", scope, function.NAME),)


def mixer_layers(decoder: Any, found: list[Attention]) -> Iterator[Attention]:
    """What carries state along the row and is handed a mask: each of :func:`mixers`, or the nearest around it.

    In a model without attention, whose layers may be handed none, what is handed something else for all layers.
    """
    attention = [layer.name for layer in found]
    done: set[str] = set()
    for name in mixers(decoder):
        parts = name.split(".")
        around = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
        around = [path for path in around if not any(f"{other}.".startswith(f"{path}.") for other in attention)]
        for names in (mixing.MASKS, *([] if attention else [mixing.OTHER_WAYS])):
            path = next((path for path in around if _takes(decoder.get_submodule(path), names)), None)
            if path is not None:
                break
        if path is not None and path not in done:
            done.add(path)
            module = decoder.get_submodule(path)
            yield Attention(path, module, "mixer", ("mixer", defining(type(module), "forward"), "forward"))


def carrier(decoder: Any, found: list[Attention]) -> str:
    """The argument of a decoder without attention in whose place boundaries get to its layers."""
    given = inspect.signature(decoder.forward).parameters
    states = ("cache_params", "state")  # of xLSTM's the decoder's is called one, the layers' the other
    for name, at_layers in {
        "attention_mask": mixing.MASKS, "cache_position": ("cache_position",), **dict.fromkeys(states, states)
    }.items():  # fmt: skip
        if name in given and all(_takes(layer.module, at_layers) for layer in found):
            return name
    return "attention_mask"


def _takes(module: Any, names: tuple[str, ...]) -> bool:
    owner = defining(type(module), "forward")
    return not owner.__module__.startswith("torch.") and mixing.is_handed(names, vars(owner)["forward"])


def see_both_ways(found: Iterable[Attention]) -> bool:
    """Whether attention layers among these let tokens see those behind them, as an encoder's do."""
    return any(
        layer.fused or not getattr(layer.module, "is_causal", getattr(layer.module, "is_decoder", True))
        for layer in found
    )


def claims_flash_attention(model: Any, found: list[Attention]) -> bool:
    """Whether its authors say that a model can be computed with flash attention, or wrote a class for it."""
    said = any(
        getattr(part, name, False)
        for part in models(model)
        for name in ("_supports_flash_attn", "_supports_flash_attn_2")
    )
    return said or any(layer.seam != "interface" for layer in found)


def mixers(decoder: Any) -> dict[str, str]:
    """Modules, by name, that carry state along the row outside attention; with what gave them away."""
    seams = {layer.name for layer in attention_layers(decoder)}  # Kimi Linear's full attention has such a name too
    named = {
        name: module
        for name, module in decoder.named_modules()
        if name and _MIXER.search(type(module).__name__) and name not in seams and "Norm" not in type(module).__name__
    }
    innermost = {name for name in named if not any(other.startswith(f"{name}.") for other in named)}
    found: dict[str, str] = {}
    handed: dict[type, set[str]] = {}
    for name, module in decoder.named_modules():
        clue = "by its name" if name in innermost else _clue(module, handed)
        if clue and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = f"{type(module).__name__} ({clue})"
    return found


def _clue(module: Any, handed: dict[type, set[str]]) -> str | None:
    cls = type(module)
    if isinstance(module, torch.nn.Conv1d) and module.kernel_size[0] > 1:
        return f"a convolution over {module.kernel_size[0]} tokens"
    if isinstance(module, (torch.nn.RNNBase, torch.nn.RNNCellBase)):
        return "recurrent"
    if cls.__module__.startswith("torch."):
        return None
    weights = [name for name in _MIXER_WEIGHTS if name in module._parameters]
    if weights:
        return f"has {weights[0]}"
    if cls not in handed:
        handed[cls] = _MIXER_ARGUMENTS & set(inspect.signature(inspect.unwrap(cls.forward)).parameters)
    has_layers = any(isinstance(child, torch.nn.ModuleList) for child in module.children())
    return f"is handed {sorted(handed[cls])[0]}" if handed[cls] and not has_layers else None


def blocks_without(decoder: Any, found: list[Attention]) -> dict[str, str]:
    """Members, by name, of the decoder's lists of layers that hold none of the attention layers found in others.

    All members of all lists where none was found.
    """
    holding: dict[str, set[str]] = {}
    for layer in found:
        parts = layer.name.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if at is not None:
            holding.setdefault(".".join(parts[:at]), set()).add(parts[at])
    if not found:
        lists = (name for name, module in decoder.named_modules() if isinstance(module, torch.nn.ModuleList))
        holding = {name: set() for name in lists}
    return {
        f"{name}.{index}": type(block).__name__
        for name, indices in holding.items()
        for index, block in decoder.get_submodule(name).named_children()
        if index not in indices and (not found or _may_look_around(block))
    }


def _may_look_around(block: Any) -> bool:
    """Whether something in a block is handed a mask, or called attention (Nemotron-H has blocks of an MLP only)."""
    if "attention" in type(block).__name__.lower():
        return True
    inside = {type(module) for module in block.modules() if module is not block}
    return any(
        "attention" in cls.__name__.lower() or mixing.is_handed(mixing.MASKS, cls.forward)
        for cls in inside
        if not cls.__module__.startswith("torch.")
    )


def defining(cls: type, attribute: str) -> type:
    """The class, ``cls`` or one that it inherits from, that defines an attribute."""
    return next(base for base in cls.__mro__ if attribute in vars(base))
