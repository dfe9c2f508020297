"""Find the layers of a model that must be given the boundaries: attention, and mixers, which carry state otherwise."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Callable

import torch

from .._types import Function, Model
from ..documents.names import LABELS
from . import caches, inspecting, mask_makers
from .architectures import is_registered, lookup, row_of
from .facts import Site, of_forward
from .find_models import models, named_modules, text_modules
from .inspecting import is_of_torch
from .other_code import is_of_model
from .packed_mask import MASK
from .seams import formula, interface
from .seams.bias import computes_bias, with_bias
from .transformers_names import CALLS_FLASH, EAGER


@dataclass(frozen=True)
class Layer:
    """A layer that must be replaced for packed rows: an attention layer or a mixer."""

    name: str  # in the decoder
    # "interface" or "formula" for an attention layer, "mixer" for a mixer, "document" for an attention layer whose base
    # model computes each document by itself
    seam: str
    site: Site  # the attribute through which the layer is given the boundaries
    others: tuple[Site, ...] = ()  # more attributes that this seam needs replaced
    # A plan drops the module, because the patch is copied with its model.
    module: Any = field(default=None, compare=False, repr=False)
    by_itself: bool = False  # its class computes attention by itself, as most encoders' do, and follows the mask

    @property
    def fused(self) -> bool:
        # ModernBERT's functions up to 5.0 take query, key and value in one tensor.
        if self.site.make is not formula.routed_table:
            return False
        return formula.is_fused(vars(self.site.owner)[self.site.attribute][formula.EAGER])


class ModelLayers:
    """A Transformers model and its layers. It is walked once, and what is found is kept for all that look at it."""

    def __init__(self, model: Model, architecture: str | None = None) -> None:
        # `architecture` is the model_type of the registry row to use instead of that of config.model_type.
        self.model, self.modules = model, named_modules(model)
        # the models whose `forward` a call goes through, the outermost first
        self.entered: tuple[Any, ...] = tuple(models(model, self.modules.values()))
        self.decoder: Model = self.entered[-1]  # it loops over the layers
        config: Any = getattr(self.decoder, "config", None)
        self.architecture = row_of(config) if architecture is None else lookup(architecture)
        # whether the row is registered for the model type, or was named
        self.vouched = architecture is not None or is_registered(config)

    @cached_property
    def text_modules(self) -> dict[str, Any]:
        return text_modules(self.decoder)

    @cached_property
    def mask_makers(self) -> dict[type, list[mask_makers.Maker]]:
        return {type(model): mask_makers.makers(type(model)) for model in self.entered}

    @cached_property
    def attention(self) -> tuple[Layer, ...]:
        """The attention layers that offer a seam, and those whose base model computes each document by itself."""
        layers, decoder = self._seams or self._blocks_apart, self.decoder
        users = self._seams and mask_makers.of_the_user(decoder, self.mask_makers[type(decoder)])
        if users or self.unknown or any(_only_by_document(layer, decoder) for layer in layers):
            site = of_forward(decoder, _as_it_is)
            layers = [replace(layer, seam="document", site=site, others=()) for layer in layers]
        return tuple(layers)

    @cached_property
    def _seams(self) -> list[Layer]:
        seams: dict[type, Layer | None] = {}
        layers = []
        for name, module in self.text_modules.items():
            cls = type(module)
            if cls not in seams:
                seams[cls] = _seam_of(module)
            found = seams[cls]
            if found is not None:
                layers.append(replace(found, name=name, module=module))
        return layers

    @cached_property
    def unknown(self) -> bool:
        # A stack of an encoder-decoder computes each document by itself where too little is known of its attention: it
        # is local, sparse, merged or n-gram attention without a seam, or does not claim flash attention, or does not
        # say in which direction it looks. No head is around it, which might prepare something for the whole row.
        found = self._seams
        heads = any(inspecting.takes(inspecting.forward_of(type(one)), LABELS[0]) for one in self.entered)
        if heads or self.vouched or not _is_of_pairs(type(self.decoder)):
            return False
        if not found:
            return bool(self._blocks_apart)
        claimed = claims_flash_attention(self.entered, found) or all(map(_is_biased, found))
        return not claimed or all(map(_is_of_no_direction, found))

    @cached_property
    def _blocks_apart(self) -> list[Layer]:
        # the blocks of a model without a seam, and without mixers
        if mixers_among(self.text_modules, ()):
            return []
        site, numbered = of_forward(self.decoder, _as_it_is), re.compile(r"[^\d]*\.\d+")
        modules = self.text_modules.items()
        return [Layer(name, "document", site, module=each) for name, each in modules if numbered.fullmatch(name)]

    @cached_property
    def carrying(self) -> dict[str, str]:
        """The modules of the decoder that carry state along the row outside attention: names, and the evidence."""
        return mixers_among(self.text_modules, self.attention)

    @cached_property
    def mixers(self) -> tuple[Layer, ...]:
        """The mixers that can be given the boundaries, or the layers around them."""
        return tuple(_mixer_layers(self))

    @property
    def by_document(self) -> bool:
        return any(layer.seam == "document" for layer in self.attention)

    @property
    def layers(self) -> tuple[Layer, ...]:
        return (*self.attention, *self.mixers)

    def __str__(self) -> str:
        return type(self.model).__name__


# Attention


def _only_by_document(layer: Layer, decoder: Model) -> bool:
    # A kernel cannot compute what such a layer does: more than a mask says, or attention of the user's own.
    if (
        layer.by_itself
        and not computes_bias(inspecting.forward_of(type(layer.module)))
        and formula.says_more(layer.module)
    ):
        return True
    modeling = inspecting.defining(type(layer.module), "forward").__module__
    config = getattr(layer.module, "config", None) or getattr(decoder, "config", None)
    functions = _of_dense_batches(layer, getattr(config, "_attn_implementation", None))
    return not all(is_of_model(function, modeling) for function in functions if function is not None)


def _of_dense_batches(layer: Layer, implementation: str | None) -> Iterator[Any]:
    # The functions that compute a layer's attention in a dense batch, and the `forward` that computes packed ones. None
    # stands for one that is missing.
    owner, attribute = layer.site.owner, layer.site.attribute
    if implementation == "sdpa":
        yield torch.nn.functional.scaled_dot_product_attention
    if layer.seam == "interface":
        table = getattr(owner, attribute)
        yield table[implementation] if implementation in table else getattr(owner, EAGER, None)
    elif attribute != "forward":
        yield getattr(owner, attribute).get(implementation)
    else:
        yield getattr(owner, attribute)
        if isinstance(layer.site.make, formula.ByFormula):
            plain, flash = layer.site.make.classes
            yield inspecting.forward_of(plain)
            yield None if flash is None else inspecting.forward_of(flash)  # it says which layers have a window
        if implementation == formula.FLASH:
            yield vars(layer.site.module).get(CALLS_FLASH)


def _as_it_is(original: Function) -> Function:
    # This site needs no replacement of its own: the forward of a base model is replaced for every patched model.
    return original


def _seam_of(module: torch.nn.Module) -> Layer | None:
    cls = type(module)
    if is_of_torch(cls):
        return None
    home = sys.modules.get(inspecting.defining(cls, "forward").__module__)
    if home is None:
        return None
    looked_up = interface.interface_of(home, inspecting.forward_of(cls))
    if looked_up is not None:
        site, others = looked_up
        biased = computes_bias(inspecting.forward_of(cls))
        return Layer("", "interface", site, (*others, of_forward(module, with_bias)) if biased else others)
    written_out = formula.formula_of(home, module)
    if written_out is None:
        return None
    by_itself = isinstance(written_out.make, formula.ByFormula) and written_out.make.classes[1] is None
    return Layer("", "formula", written_out, by_itself=by_itself)


def claims_flash_attention(entered: Iterable[Model], attention: Iterable[Layer]) -> bool:
    # A flag of a model says so, or attention layers with flash code of their own.
    flags = ("_supports_flash_attn", "_supports_flash_attn_2")
    said = any(getattr(part, name, False) for part in entered for name in flags)
    return said or any(layer.seam != "interface" for layer in attention)


def _is_of_no_direction(layer: Layer) -> bool:
    # Pegasus X's layers are a decoder's, and none says that it is causal: eager attention goes by the mask.
    said = getattr(layer.module, "is_causal", None)
    return layer.seam == "interface" and said is False and getattr(layer.module, "is_decoder", False)


def _is_biased(layer: Layer) -> bool:
    return computes_bias(inspecting.forward_of(type(layer.module)))


@functools.cache
def _is_of_pairs(stack: type) -> bool:
    # whether its file defines an encoder-decoder, too
    home = inspecting.defining(stack, "forward").__module__
    own = [each for each in vars(sys.modules[home]).values() if isinstance(each, type) and each.__module__ == home]
    forwards = [each.forward for each in own if issubclass(each, torch.nn.Module)]
    return any(inspecting.takes(forward, "decoder_input_ids") for forward in forwards)


def blocks_without(model: ModelLayers) -> dict[str, str]:
    """Return blocks without attention or a mixer whose siblings have one, as names and class names."""
    # Blocks are the members of the module lists that hold the found layers. Those that take no mask and are not called
    # attention are left out. If no layer was found, the members of all module lists are returned.
    modules, found = model.text_modules, model.layers
    holding: dict[str, set[str]] = {}
    for layer in found:
        parts = layer.name.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if at is not None:
            holding.setdefault(".".join(parts[:at]), set()).add(parts[at])
    if not found:
        holding = {name: set() for name, module in modules.items() if isinstance(module, torch.nn.ModuleList)}
    return {
        f"{name}.{index}": type(block).__name__
        for name, indices in holding.items()
        for index, block in modules[name].named_children()
        if index not in indices and (not found or _may_look_around(block))
    }


def _may_look_around(block: torch.nn.Module) -> bool:
    # Not every block looks at other tokens: Nemotron-H has blocks with an MLP only.
    inside = {type(module) for module in named_modules(block).values() if module is not block}
    return "attention" in type(block).__name__.lower() or any(
        "attention" in cls.__name__.lower() or _takes_mask(cls.forward) for cls in inside if not is_of_torch(cls)
    )


# Mixers

_NAMES = re.compile(
    r"Mamba|Mixer2?$|RecurrentBlock|Rwkv|Retention|ShortConv|DeltaNet|DeltaAttention|LightningAttention|LinearAttention"
    r"|LSTM(Backend|Layer)$"
)
_RECURRENT = (torch.nn.RNNBase, torch.nn.RNNCellBase)
_OF_TORCH = (torch.nn.Conv1d, *_RECURRENT)
_WEIGHTS = ("A_log", "dt_bias", "time_decay", "conv_kernel")
_ARGUMENTS = {"cache_params", "conv_state", "conv_states", "ssm_state", "recurrent_state", "recurrent_states"}


_MASKS = ("attention_mask", "mask", "conv_mask")  # arguments through which a mixer is given the boundaries


def _takes_mask(forward: Function) -> bool:
    # *args may hold a mask, here and below.
    return inspecting.takes_any_position(forward) or any(inspecting.takes(forward, name) for name in _MASKS)


def _takes_positions(forward: Function) -> bool:
    # Mamba up to 4.44 hands cache_position to its layers instead of a mask.
    return inspecting.takes_any_position(forward) or inspecting.takes(forward, "cache_position")


def _takes_cache(forward: Function) -> bool:
    # RWKV and xLSTM hand a cache or a state to their layers.
    return inspecting.takes_any_position(forward) or bool(caches.taken_by(forward))


def _mixer_layers(model: ModelLayers) -> Iterator[Layer]:
    # A mixer is given the boundaries in its own forward, or in that of the nearest module around it, which must take a
    # mask and hold no attention layer. In a model without attention, `cache_position` or a cache will do as well.
    names = [f"{layer.name}." for layer in model.attention]
    ways = [_takes_mask] if names else [_takes_mask, _takes_positions, _takes_cache]
    done: set[str] = set()
    for name in model.carrying:
        parts = name.split(".")
        around = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
        around = [path for path in around if not any(other.startswith(f"{path}.") for other in names)]
        path = next((path for taken in ways for path in around if _takes(model.text_modules[path], taken)), None)
        if path is not None and path not in done:
            from .seams import mixer  # with its trials and what it splits, for models that have one

            done.add(path)
            module = model.text_modules[path]
            yield Layer(path, "mixer", of_forward(module, mixer.by_document), module=module)


def carrier(model: ModelLayers) -> str:
    """Return the argument of a decoder without attention that the packed mask replaces: it reaches all mixers."""
    forward = type(model.decoder).forward
    given, cached = inspecting.upstream_parameters(forward), caches.taken_by(forward)
    # xLSTM's decoder takes a cache, its layers take state
    ways = {MASK: _takes_mask, "cache_position": _takes_positions, **dict.fromkeys(cached, _takes_cache)}
    for name, taken in ways.items():
        if name in given and all(_takes(layer.module, taken) for layer in model.mixers):
            return name
    return MASK


def _takes(module: torch.nn.Module, taken: Callable[[Function], bool]) -> bool:
    owner = inspecting.defining(type(module), "forward")
    return not is_of_torch(owner) and taken(inspecting.forward_of(type(module)))


def mixers_among(modules: dict[str, Any], attention: Iterable[Layer]) -> dict[str, str]:
    """Return the modules that carry state along the row outside attention, as names and the evidence for it."""
    # The name of Kimi Linear's full attention matches too, so attention layers are left out.
    others, classes = {layer.module for layer in attention}, {*map(type, modules.values())}
    called = {cls for cls in classes if _NAMES.search(cls.__name__) and "Norm" not in cls.__name__}
    may = {cls for cls in classes if issubclass(cls, _OF_TORCH) or not is_of_torch(cls)}
    named = [name for name, module in modules.items() if name and type(module) in called and module not in others]
    innermost = {name for name in named if not any(other.startswith(f"{name}.") for other in named)}
    found: dict[str, str] = {}
    handed: dict[type, list[str]] = {}
    for name, module in modules.items():
        clue = "by its name" if name in innermost else None
        if clue is None and type(module) in may:
            clue = _clue(module, handed)
        if clue and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = f"{type(module).__name__} ({clue})"
    return found


def _clue(module: torch.nn.Module, handed: dict[type, list[str]]) -> str | None:
    """Evidence that a module carries state along the row, or None."""
    cls = type(module)
    if isinstance(module, torch.nn.Conv1d) and module.kernel_size[0] > 1:
        return f"a convolution over {module.kernel_size[0]} tokens"
    if isinstance(module, _RECURRENT):
        return "recurrent"
    if is_of_torch(cls):
        return None
    for name in _WEIGHTS:
        if name in module._parameters:
            return f"has {name}"
    if cls not in handed:
        handed[cls] = sorted(_ARGUMENTS & inspecting.upstream_parameters(cls.forward))
    if not handed[cls] or any(isinstance(child, torch.nn.ModuleList) for child in module.children()):
        return None
    return f"is handed {handed[cls][0]}"
