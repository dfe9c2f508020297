"""The seam of models that choose an attention *class* (the method seam up to 4.42, the function seam after it).

A packed batch is computed by the ``forward`` of the flash class, whichever class (plain, sdpa, flash) the layer has.
This ``forward`` ends in ``_flash_attention_forward(q, k, v, mask, ...)``, which is a method up to 4.42 and a function
of the modeling module since. It runs on a :class:`Layer`, which stands in for the layer during that one call and adds
what a plain class lacks.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from dataclasses import dataclass, replace
from itertools import chain
from types import ModuleType
from typing import Any

import torch

from ..._torch import compiling, constant
from ..._types import Call, Config, Function
from ...binding import ABSENT
from .. import inspecting, rope
from ..packed_mask import PackedMask, find
from . import function, layer_rotary


def _reads_ids(forward: Function) -> bool:
    """Whether a flash class's ``forward`` reads a tensor's value with ``.item()``."""
    return inspecting.reads_name(forward, "item")


def known_ids(position_ids: torch.Tensor, largest: int) -> torch.Tensor:
    """Return the same ids, for which ``[:, -1].max().item()`` is ``largest``, without a read from the device.

    Flash classes of Mistral, Mixtral, Qwen2, Qwen2MoE, StarCoder2 (4.34 to 4.45) and Phi-3 (to 4.47) size their rotary
    table with it, in every layer.
    """
    try:
        told = position_ids.as_subclass(_Known)
    except RuntimeError:  # torch 2.1 makes no subclass under a dispatch mode; the ids are read then
        return position_ids
    told.largest = largest
    return told


class _Known(torch.Tensor):
    largest: int
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, tuple) and index == (slice(None), -1):
            return _Largest(self.largest)
        return super().__getitem__(index)


class _Largest:
    def __init__(self, value: int) -> None:
        self._value = value

    def max(self) -> _Largest:
        return self

    def item(self) -> int:
        return self._value


WINDOW_FLAG = "_flash_supports_window_size"
"""Says whether flash-attn takes a window. Modeling files of 4.34 to 4.42 lack the name where flash-attn is missing."""

_ORIGINAL = "_fa2patch_original"


def flash_class(modeling: ModuleType, cls: type) -> type | None:
    """Return the flash class among the attention classes that ``cls`` belongs to, or None."""
    module_classes = [base for base in cls.__mro__ if base.__module__ == modeling.__name__]
    if not module_classes:
        return None
    plain = module_classes[-1].__qualname__  # by name, because 4.39 to 4.42 execute remote code anew at each load
    for candidate in vars(modeling).values():
        if (
            isinstance(candidate, type)
            and candidate.__name__.endswith("FlashAttention2")
            and any((base.__module__, base.__qualname__) == (modeling.__name__, plain) for base in candidate.__mro__)
        ):
            return candidate
    return None


def is_method_seam(flash: type) -> bool:
    """Whether a flash class defines ``_flash_attention_forward`` as a method (up to 4.42)."""
    return "_flash_attention_forward" in vars(flash)


def window_flag(original: object) -> object:
    """Return the replacement for :data:`WINDOW_FLAG`: the original, or True where the module lacks it."""
    return True if original is ABSENT else original


class _Unwindowed:
    """A config with an endless window, for flash classes of 4.34 and 4.35 that compare a window of None."""

    sliding_window = 1 << 62

    def __init__(self, config: Config) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


class Layer:
    """Stands in for an attention layer during one packed call."""

    _flash_attn_uses_top_left_mask = False

    def __init__(self, module: Any, flash: type, mask: PackedMask) -> None:
        self._module, self._flash, self._mask = module, flash, mask

    def __getattr__(self, name: str) -> Any:
        if name == "dropout_prob" and not hasattr(self._module, name):
            return self._module.dropout.p  # the flash class of ESM in 4.52 to 4.55 reads this name
        value = getattr(self._module, name)
        if name in rope.MODULES:
            return layer_rotary.OfLayer(value, self._mask)
        if name == "config" and getattr(value, "sliding_window", 0) is None and is_method_seam(self._flash):
            return _Unwindowed(value)
        if inspect.ismethod(value) and value.__self__ is self._module:
            return types.MethodType(value.__func__, self)  # a helper must see this object as self too
        return value

    def _flash_attention_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, query_length: int, **kwargs: Any
    ) -> torch.Tensor:
        longer = kwargs.pop("use_sliding_windows", False)  # Jamba passes a tensor, which is not worth a read
        if longer is not False and _windowed(self._flash, self._module):
            kwargs["sliding_window"] = self._module.config.sliding_window
        kwargs["is_causal"] = getattr(self._module, "is_causal", True)
        return self._mask.attend(self._module, q, k, v, function.options(kwargs))


def missing(flash: type, module: torch.nn.Module) -> str:
    """Return a method that a flash class's ``forward`` calls and the layer lacks (ESM in 4.54 and 4.55), or ``""``.

    Besides the names of :class:`Layer`, three kinds of names are left out. A name that the code also holds as a string
    is checked with ``hasattr`` first. A name in an ``__init__`` is a module that only some configs create (Phi's norms
    of queries and keys). Calls of rotary modules remain in dead branches after the modules moved out of the layers
    (DiffLlama).
    """
    forward = inspecting.forward_of(flash)
    inits = (vars(cls)["__init__"] for cls in flash.__mro__ if "__init__" in vars(cls))
    known = {*dir(Layer), *rope.MODULES, *chain.from_iterable(map(inspecting.names_read, inits))}
    for name in inspecting.methods_called(forward):
        if name not in known and not inspecting.has_constant(forward, name) and not hasattr(module, name):
            return name
    return ""


@dataclass(frozen=True)
class OnFlashClass:
    """Makes the replacement for the ``forward`` of an attention class. It is picklable, and equal for equal classes.

    Attributes:
        owner: the attention class that defines ``forward``.
    """

    owner: type

    @property
    def flash(self) -> type:
        """The flash class of ``owner``."""
        flash = flash_class(sys.modules[self.owner.__module__], self.owner)
        assert flash is not None, f"{self.owner} had a flash class when it was planned"
        return flash

    def __call__(self, original: Function) -> Function:
        return on_flash_class(original, self.owner, self.flash)


def on_flash_class(original: Function, owner: type, flash: type) -> Function:
    """Return the replacement for an attention class's ``forward``.

    The replacement computes packed batches with the ``forward`` of the flash class and calls ``original`` for dense
    batches.

    Args:
        original: the ``forward`` that is replaced.
        owner: the class that defines it.
        flash: the flash class of ``owner``.
    """
    names = inspecting.parameter_names(original)[1:]
    flash_forward = original if issubclass(owner, flash) else inspecting.forward_of(flash)
    flash_forward = getattr(flash_forward, _ORIGINAL, flash_forward)
    parameters, takes_any = inspecting.parameter_names(flash_forward), inspecting.takes_any_keyword(flash_forward)
    reads_ids, casts = _reads_ids(flash_forward), _casts_wrongly(flash_forward)

    def named(given: Call, mask: PackedMask) -> str:
        """The flash class's argument for the mask. DistilBERT's has the name under which the mask came."""
        if takes_any or "attention_mask" in parameters:
            return "attention_mask"
        return next(name for name, value in given.items() if value is mask)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        mask = find(chain(args, kwargs.values()))
        if mask is None:
            return original(self, *args, **kwargs)
        given = {**dict(zip(names, args)), **kwargs}
        call = {name: value for name, value in given.items() if value is not mask and (takes_any or name in parameters)}
        mask_of_layer = replace(mask, layer=self)
        call[named(given, mask)] = mask_of_layer
        if "padding_mask" in parameters:
            call["padding_mask"] = mask_of_layer
        if reads_ids and type(call.get("position_ids")) is torch.Tensor and not compiling():
            call["position_ids"] = known_ids(call["position_ids"], mask.positions - 1)
        computed = _leaving_dtypes_alone(flash_forward) if casts else flash_forward
        return computed(Layer(self, flash, mask), **call)

    setattr(forward, _ORIGINAL, original)
    return forward


def _windowed(flash: Any, module: Any) -> bool:
    """Whether a layer has the window: in Qwen2 of 4.37 to 4.42, layers from ``max_window_layers`` on have none."""
    return not _decides_by_layer(flash) or module.layer_idx < module.config.max_window_layers


@constant
def _decides_by_layer(flash: Any) -> bool:
    return inspecting.reads_name(flash._flash_attention_forward, "max_window_layers")


class _Torch(ModuleType):
    """``torch`` with ``float32 = None``, so that no dtype equals ``torch.float32``."""

    float32 = None

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _casts_wrongly(forward: Function) -> bool:
    """Whether a flash class's ``forward`` casts float32 states in a wrong way.

    4.34's classes cast them to float16 with any weights. 4.36's Phi and GPT-NeoX read the dtype of a ``q_proj`` that
    they do not have.
    """
    names = inspecting.names_read(forward)
    return "float16" in names or ("query_key_value" in names and "q_proj" in names)


def _leaving_dtypes_alone(forward: Function) -> Function:
    """A ``forward`` in which the test ``dtype == torch.float32`` is never true, so that it casts nothing.

    The dtype is chosen in :func:`~fa2patch.upstream.packed_mask.compute_dtype` anyway.
    """
    alike = _rebound(forward)
    alike.__globals__.update(forward.__globals__, torch=_Torch("torch"))
    return alike


@functools.cache
def _rebound(forward: Function) -> types.FunctionType:
    """A copy with its own globals. It is cached, because torch.compile keeps compiled code in a function's globals."""
    return types.FunctionType(
        forward.__code__, dict(forward.__globals__), forward.__name__, forward.__defaults__, forward.__closure__
    )
