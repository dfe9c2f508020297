"""The Transformers model inside the wrappers that training puts around it."""

from __future__ import annotations

from typing import Any

import torch

from .._types import Model
from ..errors import NotAModel
from ..upstream.find_models import is_transformers_model


def transformers_model(model: object) -> Model:
    """Find the Transformers model inside the wrappers that training puts around it.

    Args:
        model: a Transformers model, or a wrapper of PEFT, accelerate, DDP, FSDP, DeepSpeed or ``torch.compile`` around
            one.

    Raises:
        NotAModel: there is no Transformers model in ``model``.
    """
    seen: Any = model
    for _ in range(16):
        if is_transformers_model(seen):
            found: Model = seen
            return found
        inside = [getattr(seen, name, None) for name in ("_orig_mod", "module", "pretrained_model", "model")]
        if hasattr(seen, "get_base_model"):  # PEFT
            inside.insert(0, seen.get_base_model())
        seen = next((inner for inner in inside if isinstance(inner, torch.nn.Module)), None)
    raise NotAModel(
        f"expected a Transformers model, or a wrapper (PEFT, accelerate, DDP, FSDP, torch.compile) around one; "
        f"found {type(model).__name__}. Hand over the model object itself."
    )
