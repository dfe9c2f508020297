"""TRL's trainers for preferences and reinforcement learning, with their padded batches computed packed."""

from __future__ import annotations

import importlib
from typing import Any

from ..errors import Fa2PatchError
from ..patch.applying import apply
from .padded_batches import pack_padded_batches

_MODELS = ("model", "ref_model", "ref_policy")
"""Attributes of a trainer that hold its models. ``ref_policy`` is of RLOOTrainer up to TRL 0.21."""


def trainer_class(base: type[Any] | None = None, share_prompts: bool = True) -> type[Any]:
    """Return a subclass of a TRL trainer whose models compute padded batches packed.

    Batches, losses, metrics and arguments are TRL's own. After the trainer's ``__init__``, the model and the reference
    model are patched, and their padded batches are computed packed in all layers, equal prompts once. Leave
    ``padding_free`` off. Generation is unchanged.

    Args:
        base: The trainer class to derive from, such as ``trl.GRPOTrainer``, ``trl.RLOOTrainer``, your own subclass or
            TRL's KTO or reward trainer. None means ``trl.DPOTrainer``.
        share_prompts: Whether the first tokens in which rows of a batch are equal are computed once, if this saves at
            least 16 tokens.

    Raises:
        Fa2PatchError: TRL cannot be imported.
    """
    if base is None:
        try:
            base = importlib.import_module("trl").DPOTrainer
        except ImportError as error:
            raise Fa2PatchError(f"trainer_class needs TRL, which does not import ({error}): pip install trl") from error
    parent: Any = base

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        parent.__init__(self, *args, **kwargs)
        for model in (getattr(self, name, None) for name in _MODELS):
            if model is not None:
                apply(model)
                pack_padded_batches(model, share_prompts)

    return type(f"Packed{parent.__name__}", (parent,), {"__init__": __init__, "__doc__": trainer_class.__doc__})
