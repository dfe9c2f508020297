"""Padding-free training for Hugging Face causal LMs: ``fa2patch.apply(model)``."""

import importlib
from typing import TYPE_CHECKING, Any

from .documents.boundaries import Boundaries
from .documents.find import boundaries
from .errors import Fa2PatchError
from .patch.applying import apply, revert, status
from .patch.state import Patch
from .upstream.architectures import Architecture, architectures, register

__version__ = "0.1.0"

__all__ = [
    "Architecture",
    "Boundaries",
    "DataCollatorForCompletionOnlyLM",
    "DataCollatorForMultimodalFlattening",
    "DataCollatorWithFlattening",
    "Fa2PatchError",
    "LightningCallback",
    "Patch",
    "TrainerCallback",
    "Verification",
    "apply",
    "architectures",
    "boundaries",
    "packed_trainer",
    "packing",
    "preference",
    "register",
    "revert",
    "status",
    "verify",
]

if TYPE_CHECKING:
    from . import packing, preference
    from .callbacks.lightning import LightningCallback
    from .callbacks.trainer import TrainerCallback
    from .data.collators import DataCollatorWithFlattening
    from .data.completion_only import DataCollatorForCompletionOnlyLM
    from .data.multimodal import DataCollatorForMultimodalFlattening
    from .data.packed_trainer import packed_trainer
    from .proof.result import Verification
    from .proof.verify import verify
else:
    _LATER = {
        "DataCollatorForCompletionOnlyLM": "data.completion_only",
        "DataCollatorForMultimodalFlattening": "data.multimodal",
        "DataCollatorWithFlattening": "data.collators",
        "LightningCallback": "callbacks.lightning",
        "TrainerCallback": "callbacks.trainer",
        "Verification": "proof.result",
        "packed_trainer": "data.packed_trainer",
        "verify": "proof.verify",
    }

    def __getattr__(name: str) -> Any:
        """Import on first use what ``apply`` does not need, whose import took a fifth of the time."""
        if name in ("packing", "preference", "testing", "traits"):
            return importlib.import_module(f"{__name__}.{name}")
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
