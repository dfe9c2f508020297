"""Models that look like others and cannot be taken: what ``apply`` refuses, each for what was found in it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from ...errors import LayerNotPatchable, UnsupportedModel
from ..layers import Attention, defining
from ..seams import method
from . import cross, directions, row_heads


def check_model(model: Any, entered: Sequence[Any]) -> None:
    """Raise where nothing can be read off a ``forward``, or the model makes one result of a whole row.

    Args:
        model: the Transformers model.
        entered: the models that a call goes through, the decoder last.
    """
    found = _without_code(entered)
    if found:
        raise LayerNotPatchable(
            f"looked at every module's forward for what it takes and does: expected functions, found that {found}. "
            "Nothing was patched. Write it as a method (def forward(self, ...): ...), or train this model padded."
        )
    found = row_heads.of_whole_rows(model)
    if found:
        raise UnsupportedModel(
            f"{type(model).__name__} {found}, and a packed row holds many documents. Nothing was patched. "
            "Train it padded."
        )


def check_attention(entered: Sequence[Any], attention: Sequence[Attention]) -> None:
    """Raise where a decoder's attention layers are not what they seem."""
    name = type(entered[-1]).__name__
    found = cross.attention_to_an_encoder(entered[-1], [layer.name for layer in attention])
    if found:
        raise UnsupportedModel(
            f"{name} attends to an encoder's states: {found}. fa2patch packs decoder-only language models. Nothing was "
            "patched. Train this model padded."
        )
    found = _broken(attention)
    if found:
        raise LayerNotPatchable(
            f"{name}: packed rows would be computed by the class for flash attention of {found}, and this version of "
            "Transformers has no such method. Nothing was patched. Upgrade Transformers, or train this model padded."
        )
    found = directions.contradiction(entered, [layer.module for layer in attention])
    if found:
        raise UnsupportedModel(
            f"{found}: eager attention would go by the one, every other by the other, and what is right is not known. "
            "Nothing was patched. Change the config so that they agree, or train this model padded."
        )


def _without_code(entered: Sequence[Any]) -> str:
    """A class, of the modules in the models that a call goes through, whose ``forward`` is no function; or nothing.

    Nothing can be read off such a one (a ``partialmethod``, an object that is called): what it is handed, what it does.
    """
    for cls in dict.fromkeys(type(module) for module in entered[0].modules()):
        if cls.__module__.startswith("torch.") or not any("forward" in vars(base) for base in cls.__mro__):
            continue
        forward = vars(defining(cls, "forward"))["forward"]
        if getattr(inspect.unwrap(forward), "__code__", None) is None:
            return f"{cls.__module__}.{cls.__qualname__}.forward is a {type(forward).__name__}"
    return ""


def _broken(attention: Iterable[Attention]) -> str:
    """An attention layer whose class for flash attention calls a method that the layer has not; or nothing."""
    for layer in attention:
        kind, owner, _ = layer.replaced
        flash = method.flash_class(sys.modules[owner.__module__], owner) if kind == "layer" else None
        name = method.missing(flash, layer.module) if flash is not None else ""
        if flash is not None and name:
            return f"{layer.name} ({type(layer.module).__name__}), whose {flash.__name__} calls self.{name}"
    return ""
