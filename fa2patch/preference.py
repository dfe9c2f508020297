"""Public names for preference training (DPO and related methods) on packed rows."""

from __future__ import annotations

import warnings
from typing import Any

from .trainers.packed_trainer import packed_trainer
from .data.pairs import DataCollatorForPreferenceFlattening, per_document_logps

__all__ = ["DataCollatorForPreferenceFlattening", "per_document_logps", "trainer_class"]


def trainer_class(base: type[Any] | None = None, share_prompts: bool = True) -> type[Any]:
    """Return what :func:`fa2patch.packed_trainer` returns. This is its first name, which warns."""
    warnings.warn(
        "fa2patch.preference.trainer_class is now fa2patch.packed_trainer.",
        FutureWarning,
        stacklevel=2,
    )
    return packed_trainer(base, share_prompts)
