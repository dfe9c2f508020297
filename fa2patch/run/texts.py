"""Whether text is packed for a model that a program makes."""

from __future__ import annotations

from typing import Any

import torch

from ..upstream import inspecting
from ..upstream.find_layers import attention_layers
from ..upstream.find_models import models


def reads_no_text(model: Any) -> str:
    """The reason why text is not packed for a model; empty if it is.

    It is empty for an encoder-decoder too, which ``apply`` refuses with its own message.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        return ""
    seen = {getattr(layer.module, "is_causal", None) for layer in attention_layers(models(model)[-1])}
    if seen == {False} and _embeds_tokens_only(model):
        return ""
    if False in seen:
        return "its attention looks both ways, and not at text alone"
    return "" if seen == {True} or model.can_generate() else "it generates no text"


def _embeds_tokens_only(model: Any) -> bool:
    try:
        embedding = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return False
    return isinstance(embedding, torch.nn.Embedding) and not inspecting.takes(model.forward, "pixel_values")
