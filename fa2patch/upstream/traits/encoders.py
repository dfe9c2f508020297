"""Encoder-decoders, decoders that attend to an encoder's states, and models of images or sound. All are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..._types import Model
from ...errors import UnsupportedModel
from .. import inspecting
from ..find_models import takes_no_token_ids, text_modules, token_embeddings
from ..looked import Looked
from .trait import Trait

ENCODED = "encoder_hidden_states"


class EncoderDecoder(Trait):
    """Refuse a model whose config says that it is an encoder-decoder."""

    name = "encoder-decoder"

    def finds(self, model: Looked) -> bool | None:
        return True if getattr(model.model.config, "is_encoder_decoder", False) else None

    def refuses(self, model: Looked, found: Any) -> None:
        raise UnsupportedModel(
            f"{model} is an encoder-decoder: fa2patch packs decoder-only language models. Train it padded."
        )


class NoTokenIds(Trait):
    """Refuse a model that takes no token ids, such as an image or audio encoder."""

    name = "no token ids"

    def finds(self, model: Looked) -> bool | None:
        return True if takes_no_token_ids(model.model) else None

    def refuses(self, model: Looked, found: Any) -> None:
        token_embeddings(model.model)  # raises the error that verify raises, too


class CrossAttention(Trait):
    """Refuse a decoder whose blocks attend to an encoder's states."""

    name = "cross attention"

    def finds(self, model: Looked) -> str | None:
        return attention_to_an_encoder(model.decoder, [layer.name for layer in model.attention]) or None

    def refuses(self, model: Looked, found: str) -> None:
        raise UnsupportedModel(
            f"{type(model.decoder).__name__} attends to an encoder's states: {found}. fa2patch packs decoder-only "
            "language models. Nothing was patched. Train this model padded."
        )


def attention_to_an_encoder(decoder: Model, attention: Sequence[str]) -> str:
    """The block of a decoder that attends to an encoder's states, as a text for an error; empty if there is none.

    A block attends to an encoder if its forward takes ``encoder_hidden_states`` and it holds more than one attention
    layer, with no list of blocks in between. The first sign is not enough: blocks of GPT-2 and BERT always take these
    states, and have a second attention layer only if the config asks for it.

    Args:
        decoder: the model that loops over the layers.
        attention: the names of its attention layers.
    """
    for name, block in text_modules(decoder):
        if name in attention or not _takes(type(block)):
            continue
        inside = [layer[len(name) + 1 :] for layer in attention if layer.startswith(f"{name}.")]
        if len(inside) > 1 and not any(isinstance(part, torch.nn.ModuleList) for part in _between(block, inside)):
            return f"{name} ({type(block).__name__}) takes {ENCODED} and holds {' and '.join(inside)}"
    return ""


def _between(block: torch.nn.Module, inside: list[str]) -> list[torch.nn.Module]:
    """The modules between a block and the attention layers in it."""
    paths = {".".join(name.split(".")[:end]) for name in inside for end in range(1, name.count(".") + 1)}
    return [block.get_submodule(path) for path in sorted(paths)]


def _takes(cls: type) -> bool:
    return not inspecting.is_of_torch(cls) and inspecting.takes(inspecting.forward_of(cls), ENCODED)
