"""The formula seam: a layer's own eager code computes packed rows, with stand-ins for its scores (``scores.py``).

Most layers had a class for each implementation up to 4.47, and some have them still. The plain one writes the formula
out, and the others are held to it. So packed rows equal the eager definition: its scale, softcap, dtypes and dropout.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType, ModuleType
from typing import Any

import torch

from ..._types import Function
from .. import caches, inspecting
from ..facts import Site
from ..other_code import require_of_model
from ..packed_mask import PackedMask, mask_among
from ..transformers_names import BIAS, CALLS_FLASH, EACH_MODEL
from . import torch_of_formulas
from .bias import computes_bias, of_longest
from .layer_of_row import ROTARY, SWITCH, LayerOfRow, says_who_sees
from .scores import FormulaMask, Products, Scores

MASKS = ("attention_mask", "mask")
EAGER, FLASH = "eager", "flash_attention_2"

# These optional arguments add nothing to the scores of a packed batch, and neither do caches.
_HARMLESS = {
    *MASKS, "head_mask", "layer_head_mask", "encoder_hidden_states", "encoder_attention_mask",
    "key_value_states", "output_attentions", "use_cache", "position_ids", "cache_position",
}  # fmt: skip


# Finding formulas


def is_formula(function: Function) -> bool:
    if not any(inspecting.takes(function, name) for name in MASKS):
        return False
    if holds_sdpa(function):
        return True
    names = inspecting.names_read(function)
    products = {"matmul", "bmm", "baddbmm"} & {*names} or inspecting.multiplies_matrices(function)
    return bool(products) and any("softmax" in name.lower() for name in names)


def convolves(module: torch.nn.Module) -> bool:
    # ConvBERT also mixes tokens by a convolution. Such a layer is a mixer.
    convolutions = (each for each in module.modules() if isinstance(each, torch.nn.modules.conv._ConvNd))
    return any(max(each.kernel_size) > 1 for each in convolutions)


def says_more(module: torch.nn.Module) -> bool:
    # A layer without a flash class (BERT and its kin up to 4.57) may add more to its scores than a mask: a position
    # bias, or relative positions. No kernel can compute that, so the base model computes each document by itself
    # (document.py).
    forward = inspecting.forward_of(type(module))
    harmless = {*_HARMLESS, *caches.taken_by(forward)}
    optional = (each for each in inspecting.parameters(inspect.unwrap(forward)) if each.default is not each.empty)
    return (
        bool(module._parameters)
        or any(_adds(child, type(module).__module__) for child in module.children())
        or any(each.name not in harmless for each in optional)
        or any(says_who_sees(buffer) and not _is_triangle(buffer) for buffer in module._buffers.values())
    )


def _is_triangle(sees: Any) -> bool:
    return bool(sees.device.type == "meta" or torch.equal(sees, torch.ones_like(sees).tril()))


def _adds(part: torch.nn.Module, modeling: str) -> bool:
    cls = type(part)
    own = cls.__module__ == modeling or cls.__module__.startswith(EACH_MODEL)
    return isinstance(part, torch.nn.Embedding) or (own and "Rotary" not in cls.__name__)


def plain_class(modeling: ModuleType, cls: type) -> type | None:
    # A layer's class inherits from the one with the eager code, unless that is in another file.
    return next((base for base in reversed(cls.__mro__) if base.__module__ == modeling.__name__), None)


def flash_class(modeling: ModuleType, plain: type) -> type | None:
    name = (modeling.__name__, plain.__qualname__)  # because 4.39 to 4.42 execute remote code anew at each load
    for candidate in vars(modeling).values():
        if not isinstance(candidate, type) or not candidate.__name__.endswith("FlashAttention2"):
            continue
        if any((base.__module__, base.__qualname__) == name for base in candidate.__mro__):
            return candidate
    return None


def helpers(plain: type) -> list[str]:
    # GPT-2, for example, computes attention in a method ``_attn`` that its ``forward`` calls.
    called = dict.fromkeys(inspecting.methods_called(inspecting.forward_of(plain)))
    return [name for name in called if callable(getattr(plain, name, None)) and is_formula(getattr(plain, name))]


def formula_of(modeling: ModuleType, module: torch.nn.Module) -> Site | None:
    cls = type(module)
    owner, forward = inspecting.defining(cls, "forward"), inspecting.forward_of(cls)
    # Gemma 2 in 4.47, GPT-NeoX in 4.47 and 4.48 and ModernBERT (4.48 to 5.0) have a dictionary of functions instead of
    # classes, of which one is eager.
    for name in filter(re.compile(r"\w+_ATTENTION_FUNCTION").fullmatch, inspecting.names_read(forward)):
        if FLASH in vars(modeling).get(name, ()):
            return Site(modeling, name, routed_table)
    plain = plain_class(modeling, cls)
    if plain is None:
        return None
    if flash_class(modeling, plain) is None:
        known = is_formula(forward)
    else:
        known = is_formula(inspecting.forward_of(plain)) or bool(helpers(plain))
    return Site(owner, "forward", ByFormula(owner)) if known and not convolves(module) else None


def is_causal(layer: Any, otherwise: bool) -> bool:
    # ``otherwise`` is the answer for a layer that does not say so. A layer without a flash class is then an encoder's.
    if otherwise:
        said = getattr(layer, "is_causal", None)
        return bool(getattr(layer, "is_decoder", True) if said is None else said)
    # BioGPT's says only that it is a decoder's (up to 4.47): its is_causal is False, and nothing reads it
    return bool(getattr(layer, "is_causal", False) or getattr(layer, "is_decoder", False))


# Computing them


@dataclass(frozen=True)
class ByFormula:
    """Makes the replacement for the ``forward`` of an attention class. It is picklable, and equal for equal classes."""

    owner: type  # the attention class that defines ``forward``

    @property
    def classes(self) -> tuple[type, type | None]:
        modeling = sys.modules[self.owner.__module__]
        plain = plain_class(modeling, self.owner)
        flash = None if plain is None else flash_class(modeling, plain)
        return (self.owner, None) if plain is None or flash is None else (plain, flash)

    def __call__(self, original: Function) -> Function:
        plain, flash = self.classes
        if flash is None:
            return by_formula(original)
        eager = original if plain is self.owner else inspecting.forward_of(plain)
        methods = {name: getattr(plain, name) for name in helpers(plain)}
        return by_formula(original, eager, methods, Windows.of(flash))


@dataclass(frozen=True)
class Windows:
    """Which layers have the sliding window of their config, as their class for flash attention says."""

    of_config: bool  # whether it reads the window in the config; a layer's own window goes before that
    asks: bool  # whether the config also says whether there are windows (``use_sliding_window``)
    # Whether the layers below ``max_window_layers`` have it (Qwen2 in 4.37 to 4.42). The others have it in later
    # versions. It is None if all layers are alike.
    below: bool | None

    @classmethod
    def of(cls, flash: type) -> Windows:
        # The window is taken from this class, because eager code of these versions has it in the mask, and for all
        # layers or none.
        forward, method = inspecting.forward_of(flash), vars(flash).get(CALLS_FLASH)
        codes = [code for code in (forward, method) if code is not None]
        by_layer = [inspecting.reads_name(code, "max_window_layers") for code in codes]
        return cls(
            any(inspecting.reads_of(code, "config", "sliding_window") for code in codes),
            any(inspecting.reads_name(code, "use_sliding_window") for code in codes),
            None if not any(by_layer) else not by_layer[0],
        )

    def of_layer(self, layer: Any) -> int | None:
        if "sliding_window" in vars(layer):  # Gemma 2
            return layer.sliding_window or None
        if not self.of_config or (self.asks and not layer.config.use_sliding_window):
            return None
        if self.below is not None and (layer.layer_idx < layer.config.max_window_layers) is not self.below:
            return None
        return getattr(layer.config, "sliding_window", None) or None


def by_formula(
    original: Function,
    eager: Function | None = None,
    methods: Mapping[str, Function] = MappingProxyType({}),
    windows: Windows | None = None,
) -> Function:
    # A layer with a class for flash attention has the ``eager`` forward of its plain class, ``methods`` that this calls
    # and that hold the formula, and ``windows``.
    eager = inspect.unwrap(eager or original)
    names, taken = inspecting.parameter_names(original)[1:], inspecting.parameter_names(eager)[1:]
    casts, biased = inspecting.casts_states(original), computes_bias(eager)
    formula, helpers = with_scores(eager), {name: with_scores(method) for name, method in methods.items()}

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        mask = mask_among(chain(args, kwargs.values()))
        if mask is None:
            return original(self, *args, **kwargs)
        window = None if windows is None else windows.of_layer(self)
        causal = is_causal(self, windows is not None)
        of_layer = FormulaMask.of(mask, self, causal, window, casts)

        def own(value: Any) -> Any:  # BERT's layers are handed the mask of cross attention beside their own
            if value is mask:
                return of_layer
            return FormulaMask.of(value, self, causal, None, casts) if isinstance(value, PackedMask) else value

        given = {**dict(zip(names, args)), **kwargs}
        call = {name: own(value) for name, value in given.items() if name in taken}
        more = helpers
        if biased:
            more = {**helpers, **of_longest(self, of_layer)}
            given_bias = call.get(BIAS)  # of the layer before
            if given_bias is not None:
                in_a_graph = isinstance(given_bias, FormulaMask)  # elsewhere it became a tensor
                call[BIAS] = replace(of_layer, bias=given_bias.bias if in_a_graph else given_bias)
        stands_in = more or self._buffers or not ROTARY.isdisjoint(self._modules) or SWITCH in vars(self)
        layer = LayerOfRow(self, of_layer, more) if stands_in else self
        return without_weights(formula(layer, **call))

    return forward


def routed_table(original: dict[str, Function]) -> dict[str, Function]:
    eager = with_scores(original[EAGER])

    def route(function: Function) -> Function:
        casts = inspecting.casts_states(function)

        @functools.wraps(function)
        def attention(*args: Any, **kwargs: Any) -> Any:
            mask = mask_among(chain(args, kwargs.values()))
            if mask is None:
                return function(*args, **kwargs)
            module = args[0] if isinstance(args[0], torch.nn.Module) else None  # GPT-NeoX hands none
            require_of_model(function, module)
            causal, window = is_causal(module, not is_fused(eager)), getattr(module, "sliding_window", None)

            def of_layer(value: Any) -> Any:
                return FormulaMask.of(value, module, causal, window, casts) if isinstance(value, PackedMask) else value

            given = {name: of_layer(value) for name, value in kwargs.items()}
            return without_weights(eager(*map(of_layer, args), **given))

        return attention

    return {name: route(function) for name, function in original.items()}


def without_weights(output: Any) -> Any:
    # A layer also returns weights if its config says so, and kernels make none.
    if isinstance(output, tuple) and not {Scores, FormulaMask}.isdisjoint(map(type, output)):
        return tuple(
            each.bias if type(each) is FormulaMask else None if type(each) is Scores else each for each in output
        )
    return output


def is_fused(function: Function) -> bool:
    # ModernBERT (4.48 to 5.0) has query, key and value in one tensor.
    return inspecting.takes(function, "qkv")


def with_scores(function: Function) -> Function:
    """A copy of a function whose product of queries and keys gives :class:`~.scores.Scores`."""
    own: dict[str, Any] = {"torch": torch_of_formulas}
    for name in inspecting.names_read(function):
        value = function.__globals__.get(name)
        if isinstance(value, torch.jit.ScriptFunction):  # GPTBigCode's softmax
            own[name] = getattr(value, "_torchdynamo_inline", value)
        elif name == "repeat_kv":
            own[name] = _unrepeated
    held = {**function.__globals__, **own}  # dynamo looks at the globals before it traces what refreshes them,
    held.pop("__name__", None)  # and would look them up in the module of this name
    alike = types.FunctionType(function.__code__, held, function.__name__, function.__defaults__, function.__closure__)
    alike.__kwdefaults__ = function.__kwdefaults__
    writes_products, sdpa = inspecting.multiplies_matrices(function), holds_sdpa(function)

    @functools.wraps(function)
    def formula(*args: Any, **kwargs: Any) -> Any:
        # one dictionary, because torch.compile keeps compiled code in it; refreshed, because others replace globals;
        # in one step, because another thread may be computing with it
        fresh = {**function.__globals__, **own}
        fresh.pop("__name__", None)
        alike.__globals__.update(fresh)
        # the mode costs a call for each function of torch
        if not writes_products or (sdpa and _chooses_sdpa(args[0])):
            return alike(*args, **kwargs)
        with Products():
            return alike(*args, **kwargs)

    return formula


def holds_sdpa(function: Function) -> bool:
    return inspecting.reads_name(function, "scaled_dot_product_attention")


def _chooses_sdpa(layer: Any) -> bool:
    # Falcon's layer holds both the formula and sdpa.
    config = getattr(layer, "config", None)
    return getattr(layer, SWITCH, False) or getattr(config, "_attn_implementation", None) == "sdpa"


def _unrepeated(states: torch.Tensor, times: int) -> torch.Tensor:
    # This takes the place of ``repeat_kv``, because kernels let several query heads share a key head.
    return states
