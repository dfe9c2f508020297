"""Find the models that a call goes through."""

from __future__ import annotations

from typing import Any

from .._types import Model


def is_transformers_model(module: object) -> bool:
    """Whether a module is a ``PreTrainedModel``; Transformers is not imported for this."""
    return any(
        cls.__name__ == "PreTrainedModel" and cls.__module__.split(".")[0] == "transformers"
        for cls in type(module).__mro__
    )


def models(model: Model) -> list[Any]:
    """Return the models whose ``forward`` a call goes through, the outermost first, the one with the layer loop last.

    These are the models that hold the embedding of the input ids. For ``GPT2LMHeadModel`` they are the model and its
    ``transformer``. For a vision-language model they include the text side, but never a vision tower. Where no model
    holds the embedding, ``base_model_prefix`` names the inner model.
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
