"""Which models a call goes through."""

from __future__ import annotations

from typing import Any


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
