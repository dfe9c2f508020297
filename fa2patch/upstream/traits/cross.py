"""Attention to an encoder's states, in decoders that were made to stand behind one."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

ENCODED = "encoder_hidden_states"


def attention_to_an_encoder(decoder: Any, attention: Sequence[str]) -> str:
    """What in a decoder attends to an encoder's states; nothing where nothing does.

    Told by the block around, the nearest that is no list of blocks: its forward takes those states, and it holds more
    than one attention layer. (GPT-2's and BERT's take them always, and hold a second layer only where the config says.)

    Args:
        attention: the names of the attention layers.
    """
    for name, block in decoder.named_modules():
        if name in attention or not _takes(type(block)):
            continue
        inside = [layer[len(name) + 1 :] for layer in attention if layer.startswith(f"{name}.")]
        if len(inside) > 1 and not any(isinstance(part, torch.nn.ModuleList) for part in _between(block, inside)):
            return f"{name} ({type(block).__name__}) takes {ENCODED} and holds {' and '.join(inside)}"
    return ""


def _between(block: Any, inside: list[str]) -> list[Any]:
    """The modules between a block and the attention layers in it."""
    paths = {".".join(name.split(".")[:end]) for name in inside for end in range(1, name.count(".") + 1)}
    return [block.get_submodule(path) for path in sorted(paths)]


def _takes(cls: type) -> bool:
    forward: Any = getattr(cls, "forward", None)
    return not cls.__module__.startswith("torch.") and ENCODED in inspect.signature(forward).parameters
